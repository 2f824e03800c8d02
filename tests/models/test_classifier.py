import dataclasses
import functools

import jax
import numpy as np
import oracle
import pytest
import tiny_nli
import trees
from flax import traverse_util

from nebula_jax.data import tokenizers
from nebula_jax.models import classifier, pretrained

SEP = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("classifier") / "model"
    return tiny_nli.write_model(folder, has_pooler=True, layers=1)


@functools.cache
def made(folder, **fields):
    model, words = pretrained.load(folder), tokenizers.load(folder)
    config = classifier.config(model, words, **fields)
    # The head alone is drawn: operation by operation that is compiled once for all.
    return config, classifier.init(config, jax.random.key(0), model)


logits_of = jax.jit(classifier.logits, static_argnums=0)

IDS = np.asarray([[2, 8, 9, SEP, 10, 11, SEP], [2, 12, SEP, 9, SEP, 0, 0]], np.int32)


def test_the_second_sentence_is_what_follows_the_first_separator():
    np.testing.assert_array_equal(
        classifier.segments(IDS, SEP), [[0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1]]
    )


def test_padding_changes_nothing(folder):
    config, params = made(folder, pooling="mean")
    logits = logits_of(config, params, IDS)
    assert logits.shape == (2, 3)
    longer = np.pad(IDS, ((0, 0), (0, 5)))
    np.testing.assert_allclose(logits_of(config, params, longer), logits, atol=1e-5)


def test_pooling_takes_the_first_position_or_the_mean_of_all():
    hidden = np.random.RandomState(0).randn(2, 4, 3).astype(np.float32)
    mask = np.asarray([[1, 1, 1, 1], [1, 1, 0, 0]], bool)
    np.testing.assert_array_equal(classifier.pool("cls", hidden, mask), hidden[:, 0])
    want = [hidden[0].mean(0), hidden[1, :2].mean(0)]
    np.testing.assert_allclose(classifier.pool("mean", hidden, mask), want, rtol=1e-5)


def test_token_types_matter_to_bert_and_not_to_xlm_r(folder):
    config, params = made(folder)
    assert config.has_segments
    table = params["embeddings"]["token_type_embeddings"]["embedding"]
    embeddings = params["embeddings"] | {
        "token_type_embeddings": {"embedding": table * np.asarray([[1.0], [-1.0]])}
    }
    other = params | {"embeddings": embeddings}

    def apart(config):
        logits = (logits_of(config, each, IDS) for each in (params, other))
        return float(np.abs(np.subtract(*logits)).max())

    assert apart(config) > 1e-3
    assert apart(dataclasses.replace(config, has_segments=False)) == 0


def test_xlm_rs_pieces_have_no_segments_whatever_the_model(tmp_path):
    """e5 and multilingual MiniLM are BERTs with two token types, and use one."""
    folder = tiny_nli.write_model(tmp_path / "model", layers=1)
    pieces = (folder / "vocab.txt").read_text().splitlines()
    pieces[:5] = ["<pad>", "<unk>", "<s>", "</s>", "<mask>"]
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n")
    assert not made(folder)[0].has_segments


def test_the_pretrained_pooler_is_where_it_was(folder):
    model = pretrained.load(folder)
    _, params = made(folder)
    trees.assert_same(params["classifier"]["dense"], model.params["pooler"]["dense"])
    assert params.keys() == {"embeddings", "encoder", "classifier"}
    without = tiny_nli.write_model(folder.parent / "without", layers=1)
    new = made(without)[1]["classifier"]
    assert new["dense"]["kernel"].shape == (16, 16)
    assert new["output"]["kernel"].shape == (16, 3)


def test_a_gradient_reaches_all_parts_of_a_classifier(tmp_path):
    """Of a family whose body is not BERT's."""
    model = pretrained.load(oracle.write(tmp_path, "modernbert"))
    config = classifier.Config(
        model.config,
        tokenizers.SpecialTokens(0, 1, 2, SEP, 4, size=60),
        has_segments=model.config.token_types > 1,
    )
    params = classifier.init(config, jax.random.key(0), model)
    spread = jax.grad(lambda own: classifier.logits(config, own, IDS).std())
    grads = jax.jit(spread)(params)
    for path, leaf in traverse_util.flatten_dict(grads, sep="/").items():
        # The bias of keys moves all scores of a query alike.
        assert np.any(leaf) or path.endswith("key/bias"), path
