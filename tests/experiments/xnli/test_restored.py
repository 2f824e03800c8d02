import jax
import numpy as np
import pytest
import tiny_nli

from experiments.xnli import models, restored
from nebula_jax.models import pretrained
from nebula_jax.training import checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "bert"
    return pretrained.load(tiny_nli.write_model(folder, has_pooler=True))


def trained_rows(model, keep):
    """Rows of the table that a run has turned into their negatives."""
    embeddings = model.params["embeddings"]
    table = embeddings["word_embeddings"]["embedding"]
    return embeddings | {"word_embeddings": {"embedding": -table[keep]}}


KEEP = np.asarray([0, 1, 2, 3, 4, 9])


def test_an_unseen_piece_has_the_row_that_it_had(model):
    """Rows that were trained come back to their places; the others stay."""
    table = model.params["embeddings"]["word_embeddings"]["embedding"]
    rows = trained_rows(model, KEEP)
    params = {
        "encoder": {"layer_0": 1},
        "embeddings": rows | {"layer_norm": 2},
        "classifier": {"dense": 3},
    }
    left = restored.Trained(params, KEEP, 1).as_encoder(model, "cls").params
    assert (left["encoder"]["layer_0"], left["embeddings"]["layer_norm"]) == (1, 2)
    got = left["embeddings"]["word_embeddings"]["embedding"]
    np.testing.assert_array_equal(got[KEEP], -table[KEEP])
    filled = restored.Trained({"embeddings": rows}, KEEP, 1).with_trained_rows(model)
    got = filled.params["embeddings"]["word_embeddings"]["embedding"]
    np.testing.assert_array_equal(got[KEEP], -table[KEEP])
    rest = np.setdiff1d(np.arange(len(table)), KEEP)
    np.testing.assert_array_equal(got[rest], table[rest])


def test_rows_of_another_encoder_are_refused(model):
    params = {"embeddings": trained_rows(model, KEEP)}
    for keep in (KEEP[1:], KEEP + model.config.vocab_size):
        with pytest.raises(pretrained.PretrainedError, match="is another one's"):
            restored.Trained(params, keep, 1).with_trained_rows(model)


def test_the_classifiers_layer_is_the_poolers_if_the_first_position_was_classified(
    model,
):
    params = {"encoder": {}, "classifier": {"dense": "trained"}}
    trained = restored.Trained(params, KEEP, 1)
    assert trained.as_encoder(model, "cls").params["pooler"] == {"dense": "trained"}
    kept = trained.as_encoder(model, "mean").params["pooler"]
    jax.tree.map(np.testing.assert_array_equal, kept, model.params["pooler"])


def test_a_classifier_has_what_was_trained_and_a_model_of_another_shape_is_refused(
    model,
):
    run_params = {"classifier": {"bias": np.ones(3)}, "encoder": {"a": np.ones(2)}}
    new = {name: jax.tree.map(np.zeros_like, of) for name, of in run_params.items()}
    new["embeddings"] = {"word_embeddings": {"embedding": np.zeros((4, 2))}}
    trained = restored.Trained(run_params, KEEP, 1)
    found = trained.as_classifier_params(new)
    jax.tree.map(np.testing.assert_array_equal, found, new | run_params)
    new["encoder"] = {"a": np.zeros(5)}
    with pytest.raises(checkpoint.CheckpointError, match="another shape"):
        trained.as_classifier_params(new)


def test_the_encoder_must_have_the_positions_of_the_longest_row(tmp_path):
    tiny_nli.write_model(tmp_path / "models" / "bert")
    run = tiny_nli.run_in(tmp_path, length_buckets="16,32")
    with pytest.raises(pretrained.PretrainedError, match="has 16 positions"):
        models.load(run)
