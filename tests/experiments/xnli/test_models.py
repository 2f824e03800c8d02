import dataclasses
import json

import configured
import jax
import numpy as np
import pytest
import tiny_nli
import trees

from experiments.xnli import config, models
from nebula_jax import errors
from nebula_jax.models import classifier, modern, pretrained
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.training import checkpoint, partition


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return loaded(tmp_path_factory.mktemp("model"))[0]


def loaded(folder):
    """A model of two layers, and its tokenizer."""
    written = tiny_nli.write_model(folder / "bert", has_pooler=True)
    return pretrained.load_with_tokenizer(written, 16)


KEEP = np.asarray([0, 1, 2, 3, 4, 9])


@pytest.mark.parametrize("family", ["electra", "xlm_roberta", "ernie_m"])
def test_a_classifier_of_the_first_position_is_left_with_the_model(tmp_path, family):
    """Its dense layer is read again as the pooler, where the family has it there."""
    folder = tiny_nli.write_model(tmp_path / "before", family=family)
    model, tokenizer = pretrained.load_with_tokenizer(folder)
    params = classifier.init(
        classifier.config(model, tokenizer), jax.random.key(0), model
    )
    trained = models.Trained(params, np.arange(tokenizer.size), 1)
    left = trained.as_checkpoint(model, "cls")
    pretrained.save(tmp_path / "left", left)
    about = json.loads((tmp_path / "left" / "config.json").read_text())
    assert about["id2label"] == {
        "0": "entailment",
        "1": "neutral",
        "2": "contradiction",
    }
    assert about["architectures"][0].endswith("ForSequenceClassification")
    again = pretrained.load(tmp_path / "left")
    assert again.family == ("bert" if family == "electra" else family)
    assert again.config == model.config
    if family != "xlm_roberta":
        dense = {"dense": params["classifier"]["dense"]}
        jax.tree.map(np.testing.assert_array_equal, again.params["pooler"], dense)


def test_a_classifier_that_transformers_has_not_is_left_out(model, tmp_path):
    params = model.params | {"classifier": {"dense": "trained", "output": "trained"}}
    trained = models.Trained(params, np.arange(model.config.vocab_size), 1)
    kept = trained.as_checkpoint(model, "mean").params
    assert "classifier_head" not in kept
    jax.tree.map(np.testing.assert_array_equal, kept["pooler"], model.params["pooler"])
    shape = dataclasses.replace(model.config, embedding_width=8)
    narrow = model._replace(config=shape, family="electra")
    left = trained.as_checkpoint(narrow, "cls")
    assert left.family == "electra"
    assert "classifier_head" not in left.params
    shape = dataclasses.replace(model.config, body=modern.Body())
    other = model._replace(config=shape, family="modernbert")
    assert "classifier_head" not in trained.as_checkpoint(other, "cls").params


def test_frozen_embeddings_are_the_models(tmp_path):
    """The checkpoint is a whole one."""
    run = configured.run(config, freeze_embeddings=1)
    is_trained = models.is_trained(run)
    model, tokenizer = loaded(tmp_path)
    shape = classifier.config(model, tokenizer, pooling="mean")
    fresh = classifier.init(shape, jax.random.key(0), model)
    new = {"encoder": model.params["encoder"], "classifier": fresh["classifier"]}
    new, _ = partition.split(jax.tree.map(np.negative, new), is_trained)
    trained = models.Trained(new, KEEP, 1)
    wanted = partition.merge(new, partition.split(fresh, is_trained)[1])
    found = trained.as_classifier_params(fresh, is_trained)
    trees.assert_same(found, wanted)
    pretrained.save(tmp_path / "left", trained.as_checkpoint(model, "mean"))
    left = pretrained.load(tmp_path / "left")
    trees.assert_same(left.params["encoder"], wanted["encoder"])
    with pytest.raises(checkpoint.CheckpointError, match="another shape"):
        trained.as_classifier_params(fresh, partition.train_all)


def test_devices_that_cannot_share_a_batch_of_evaluation_are_refused(tmp_path):
    run = tiny_nli.run_in(tmp_path, eval_batch_size=64)
    mesh = mesh_lib.make_mesh(jax.devices()[:3])
    words = "--eval_batch_size=64 cannot be split evenly over 3 devices"
    with pytest.raises(errors.SettingsError, match=words):
        models.predictor(run, None, mesh)
