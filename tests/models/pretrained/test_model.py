"""A model cut down to a text, and put back."""

import jax
import numpy as np
import pytest
import tiny_nli

from nebula_jax.data import tokenizers
from nebula_jax.models import pretrained


@pytest.fixture
def folder(tmp_path):
    return tiny_nli.write_model(tmp_path / "model")


def table(model, name="word_embeddings"):
    return np.asarray(model.params["embeddings"][name]["embedding"])


def test_model_and_tokenizer_are_read_together(folder):
    model, tokenizer = pretrained.load_with_tokenizer(folder, 8, dropout=0.1)
    assert model.config == pretrained.load(folder, dropout=0.1).config
    assert tokenizer.digest == tokenizers.load(folder).digest


def test_a_model_of_too_few_positions_is_refused(folder):
    positions = pretrained.load(folder).config.max_length
    pretrained.load_with_tokenizer(folder, positions)
    with pytest.raises(pretrained.PretrainedError, match=f"has {positions} positions"):
        pretrained.load_with_tokenizer(folder, positions + 1)


def test_a_folder_without_its_tokenizer_is_refused(folder):
    vocabulary = folder / "vocab.txt"
    pieces = vocabulary.read_text()
    vocabulary.unlink()
    with pytest.raises(tokenizers.NoTokenizerError, match="has no tokenizer"):
        pretrained.load_with_tokenizer(folder)
    vocabulary.write_text(f"{pieces}more\n")
    with pytest.raises(pretrained.PretrainedError, match="is not that of a model"):
        pretrained.load_with_tokenizer(folder)


def test_model_and_tokenizer_are_trimmed_to_a_text_alike(folder):
    model, tokenizer = pretrained.load_with_tokenizer(folder)
    texts = [tokenizer.piece(tokenizer.size - 1), tokenizer.piece(tokenizer.size - 3)]
    counts = tokenizers.count_pieces(tokenizer, texts)
    small, trimmed, keep = pretrained.trim_to(model, tokenizer, counts)
    assert set(keep) == {*np.flatnonzero(counts), *tokenizer.special.ids}
    assert small.config.vocab_size == trimmed.size == len(keep) < tokenizer.size
    for text in texts:
        whole_ids, ids = tokenizer.encode(text), trimmed.encode(text)
        np.testing.assert_array_equal(table(small)[ids], table(model)[whole_ids])


def test_trained_rows_go_back_into_the_whole_table_and_others_stay(folder):
    model = pretrained.load(folder)
    rows = np.asarray([3, 0, 7, 1])
    trained = jax.tree.map(
        lambda leaf: leaf + 1, pretrained.select_rows(model, rows).params["embeddings"]
    )
    positions = trained["position_embeddings"]
    trained["position_embeddings"] = {"embedding": positions["embedding"][:5]}
    whole = pretrained.with_rows(model, trained, rows)
    changed = np.isin(np.arange(len(table(model))), rows)
    np.testing.assert_array_equal(table(whole)[rows], table(model)[rows] + 1)
    np.testing.assert_array_equal(table(whole)[~changed], table(model)[~changed])
    before, after = (table(each, "position_embeddings") for each in (model, whole))
    np.testing.assert_array_equal(after[:5], before[:5] + 1)
    np.testing.assert_array_equal(after[5:], before[5:])
    scale = [
        each.params["embeddings"]["layer_norm"]["scale"] for each in (whole, model)
    ]
    np.testing.assert_array_equal(scale[0], scale[1] + 1)
    assert whole.config == model.config


@pytest.mark.parametrize("rows", [[0, 1], [0, 1, 999]])
def test_a_table_of_another_model_is_refused(folder, rows):
    model = pretrained.load(folder)
    trained = pretrained.select_rows(model, np.arange(3)).params["embeddings"]
    with pytest.raises(pretrained.PretrainedError, match="word_embeddings: the table"):
        pretrained.with_rows(model, trained, np.asarray(rows))
