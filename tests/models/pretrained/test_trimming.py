import jax
import numpy as np
import oracle
import pytest
import tiny_nli
import trees

from nebula_jax.data import tokenizers
from nebula_jax.models import pretrained
from nebula_jax.models.pretrained import trimming


@pytest.fixture
def folder(tmp_path):
    return tiny_nli.write_model(tmp_path / "model")


def table(model, name="word_embeddings"):
    return np.asarray(model.params["embeddings"][name]["embedding"])


def test_first_layers_are_taken_without_heads(tmp_path):
    whole = pretrained.load(oracle.write(tmp_path))
    first = trimming.first_layers(whole, 1)
    assert first.config.layers == 1
    assert set(first.params) == {"embeddings", "encoder"}
    assert list(first.params["encoder"]) == ["layer_0"]
    with pytest.raises(pretrained.PretrainedError, match="3 layers of a model"):
        trimming.first_layers(whole, 3)


@pytest.mark.parametrize("name", ["bert", "xlm_roberta"])
def test_a_trimmed_vocabulary_changes_no_output(name, tmp_path, monkeypatch):
    model = pretrained.load(oracle.write(tmp_path, name))
    before = oracle.ours(model)
    keep = np.unique([*oracle.INPUT_IDS.ravel(), 1])
    small = trimming.trim(model, keep)
    assert small.config.vocab_size == len(keep)
    table = small.params["embeddings"]["word_embeddings"]["embedding"]
    assert len(table) == len(keep)
    ids = np.searchsorted(keep, oracle.INPUT_IDS).astype(np.int32)
    monkeypatch.setattr(oracle, "INPUT_IDS", ids)
    after = oracle.ours(small)
    mask = oracle.ATTENTION_MASK
    if "mlm_logits" in before:
        np.testing.assert_allclose(
            after.pop("mlm_logits")[mask],
            before.pop("mlm_logits")[mask][:, keep],
            rtol=1e-6,  # a matrix product of another shape may add in another order
            atol=1e-6,
        )
    assert after.keys() == before.keys()
    for output in before:
        where = ... if output == "pooled" else mask
        np.testing.assert_array_equal(after[output][where], before[output][where])
    pretrained.save(tmp_path / "small", small)
    trees.assert_same(pretrained.load(tmp_path / "small").params, small.params)


def test_trimming_keeps_the_padding_piece(tmp_path):
    model = pretrained.load(oracle.write(tmp_path, pad_token_id=3))
    assert trimming.trim(model, [3, 5, 8]).metadata["pad_token_id"] == 0
    with pytest.raises(pretrained.PretrainedError, match="pad_token_id 3 is not"):
        trimming.trim(model, [0, 1])


def test_model_and_tokenizer_are_trimmed_to_a_text_alike(folder):
    model, tokenizer = pretrained.load_with_tokenizer(folder)
    texts = [tokenizer.piece(tokenizer.size - 1), tokenizer.piece(tokenizer.size - 3)]
    counts = tokenizers.count_pieces(tokenizer, texts)
    small, trimmed, keep = trimming.trim_to(model, tokenizer, counts)
    assert set(keep) == {*np.flatnonzero(counts), *tokenizer.special.ids}
    assert small.config.vocab_size == trimmed.size == len(keep) < tokenizer.size
    for text in texts:
        whole_ids, ids = tokenizer.encode(text), trimmed.encode(text)
        np.testing.assert_array_equal(table(small)[ids], table(model)[whole_ids])


def test_trained_rows_go_back_into_the_whole_table_and_others_stay(folder):
    model = pretrained.load(folder)
    rows = np.asarray([3, 0, 7, 1])
    trained = jax.tree.map(
        lambda leaf: leaf + 1, trimming.select_rows(model, rows).params["embeddings"]
    )
    positions = trained["position_embeddings"]
    trained["position_embeddings"] = {"embedding": positions["embedding"][:5]}
    whole = trimming.with_rows(model, trained, rows)
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
    trained = trimming.select_rows(model, np.arange(3)).params["embeddings"]
    with pytest.raises(pretrained.PretrainedError, match="word_embeddings: the table"):
        trimming.with_rows(model, trained, np.asarray(rows))
