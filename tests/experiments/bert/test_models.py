"""The model that a BERT run begins with, and the folder that it leaves."""

import configured
import numpy as np
import pytest
import tiny_hot_start
import tiny_runs

from experiments.bert import config, models
from nebula_jax import errors
from nebula_jax.data import tokenizers
from nebula_jax.models import pretrained


@pytest.fixture(scope="module")
def hot(tmp_path_factory):
    """A checkpoint, and the vocabulary of a run that begins with it."""
    folder = tmp_path_factory.mktemp("hot")
    checkpoint = tiny_hot_start.write_model(folder / "before", has_pooler=True)
    text = tiny_runs.write_text(folder / "text")
    return checkpoint, tiny_hot_start.vocabulary(
        folder / "vocabulary",
        hot_start=str(checkpoint),
        data_dir=str(text),
        languages=["en de sw"],
    )


def run_of(hot, **given):
    common = {"hot_start": hot[0], "max_length": tiny_hot_start.LENGTH}
    return configured.run(config, **common | given)


@pytest.mark.parametrize("layers", [0, 1])
def test_it_begins_with_the_encoder_or_its_first_layers(hot, tmp_path, layers):
    run = run_of(hot, layers=layers, dropout=0.2, dtype="bfloat16")
    made = models.load(run, hot[1])
    whole = pretrained.load(hot[0])
    wanted = layers or whole.config.layers
    shape = made.config.encoder
    assert (shape.layers, shape.vocab_size) == (wanted, hot[1].size)
    assert shape.max_length == tiny_hot_start.LENGTH
    assert (shape.dropout, shape.dtype) == (0.2, "bfloat16")
    assert set(made.encoder) == {"embeddings", "encoder"}
    assert set(made.encoder["encoder"]) == {f"layer_{n}" for n in range(wanted)}
    rows = np.searchsorted(tokenizers.load(hot[0]).old_ids, hot[1].rows)
    np.testing.assert_array_equal(
        made.encoder["embeddings"]["word_embeddings"]["embedding"],
        whole.params["embeddings"]["word_embeddings"]["embedding"][rows],
    )
    assert models.describe(run, made)["encoder"] == {"layers": wanted, "width": 16}
    models.export(tmp_path, run, made, hot[1], made.encoder)
    left = pretrained.load(tmp_path / "encoder")
    assert left.config.layers == wanted
    assert ("pooler" in left.params) == (not layers)


def test_from_scratch_it_has_the_size_and_no_parameters(hot):
    words = hot[1]._replace(rows=None)
    run = configured.run(config, model_size="nano", layers=4, max_length=8)
    made = models.load(run, words)
    assert made.encoder is None
    shape = made.config.encoder
    assert (shape.layers, shape.width) == (4, 64)
    assert (shape.vocab_size, shape.max_length) == (words.size, 8)


def test_fragments_divide_the_layers(hot):
    words = hot[1]._replace(rows=None)
    for size, fragments in (("mini", 4), ("mini", 2), ("base", 6)):
        models.load(configured.run(config, model_size=size, fragments=fragments), words)
    run = configured.run(config, model_size="base", fragments=5)
    with pytest.raises(errors.SettingsError, match=r"the 12 layers.*; 4 does"):
        models.load(run, words)
    with pytest.raises(errors.SettingsError, match=r"the 1 layers.*; 1 does"):
        models.load(run_of(hot, layers=1, fragments=2), hot[1])


def test_adapters_leave_no_encoder(hot, tmp_path, capsys):
    run = run_of(hot, trains="adapters_and_head")
    made = models.load(run, hot[1])
    models.export(tmp_path, run, made, hot[1], made.encoder)
    assert not (tmp_path / "encoder").exists()
    said = "--trains=adapters_and_head: no encoder is exported"
    assert said in capsys.readouterr().err
