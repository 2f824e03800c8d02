import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_checkpoints
import tiny_translations

from experiments.abnet import models
from nebula_jax import errors
from nebula_jax.models import transformer
from nebula_jax.parallel import mesh as mesh_lib


@pytest.fixture
def folder(tmp_path):
    return tiny_translations.write_model(tmp_path / "model", 16, seed=0)


@pytest.fixture
def run():
    return tiny_translations.run(length_buckets="8", micro_batches=1)


def test_another_order_of_pieces_is_another_model(folder, run):
    """Though it has as many of them: a run does not go on with it."""
    before = models.load(run, folder).digest
    assert models.load(run, folder).digest == before
    *pieces, last, unsaid = (folder / "vocab.txt").read_text().splitlines()
    pieces += [unsaid, last]
    (folder / "vocab.txt").write_text("".join(f"{each}\n" for each in pieces))
    assert models.load(run, folder).digest != before


def test_the_same_weights_in_another_shape_are_another_model(folder, run):
    """With more heads, tensors are as large, and hidden states others."""
    before = models.load(run, folder)
    about = json.loads((folder / "config.json").read_text())
    about["num_attention_heads"] *= 2
    (folder / "config.json").write_text(json.dumps(about))
    after = models.load(run, folder)
    assert after.model.config.heads == 2 * before.model.config.heads
    assert after.digest != before.digest


def test_of_a_model_the_first_layers_alone_may_be_used(folder, run):
    whole, one = (models.load(run, folder, layers) for layers in (0, 1))
    assert whole.model.config.layers == 2
    assert one.model.config.layers == len(one.model.params["encoder"]) == 1
    assert one.digest != whole.digest


def test_a_model_of_other_layers_than_berts_is_refused(tmp_path, run):
    parts = ("embeddings", "encoder")
    tiny_checkpoints.write(tmp_path / "own", ["the"], parts, family="modernbert")
    with pytest.raises(errors.SettingsError, match="own is a modernbert; ABNet's"):
        models.load(run, tmp_path / "own")


def test_a_head_that_was_made_here_trains_and_one_that_came_does_not(folder, run):
    """With the adapters; the table that it is tied to stays as it is."""
    for new_head in (False, True):
        is_trained = models.load(run, folder, new_head=new_head).is_trained
        assert is_trained("mlm_head/dense/kernel") == new_head
        assert is_trained("adapters_0/output/kernel")
        assert not is_trained("embeddings/word_embeddings/embedding")
        assert not is_trained("encoder/layer_0/output/kernel")


@pytest.mark.parametrize("side", [models.SOURCE, models.TARGET])
def test_the_target_draws_anew_at_each_step_and_the_source_alike(folder, run, side):
    """So a target is masked anew at each visit; dropout of H^E is the example's."""
    plm = models.load(run, folder)
    half = models.half(run, side, plm, plm.model.config)
    state = half.fresh.init()
    drawn = [
        jax.random.key_data(key).tolist()
        for step in (1, 2)
        for _, key in half.with_key(range(2), state.at_step(step))
    ]
    one, again, two, _ = drawn
    assert one == again
    assert (one == two) == (side == models.SOURCE)


def test_frozen_matrices_are_placed_as_products_take_them():
    frozen = {
        "dense": {"kernel": np.ones((4, 4), np.float32), "bias": np.zeros(4, "f4")},
        "embeddings": {"embedding": np.full((3, 4), 1 / 3, np.float32)},
    }
    config = transformer.Config(
        vocab_size=3, layers=1, width=4, heads=1, feed_forward=4, max_length=2,
        dtype="bfloat16",
    )  # fmt: skip
    mesh = mesh_lib.make_mesh(jax.devices()[:1])
    placed = models.place_frozen(mesh, frozen, config)
    dtypes = jax.tree.map(lambda leaf: leaf.dtype, placed)
    assert dtypes == {
        "dense": {"kernel": jnp.bfloat16, "bias": jnp.float32},
        "embeddings": {"embedding": jnp.float32},
    }


def test_a_bottleneck_wider_than_the_model_is_refused_before_anything_starts(folder):
    run = tiny_translations.run(length_buckets="8", source_model=folder, bottleneck=17)
    with pytest.raises(errors.SettingsError, match="--bottleneck=17: more than the"):
        models.load_source(run)
    shape = transformer.Config(40, 1, 16, 2, 32, 16)
    with pytest.raises(errors.SettingsError, match="--bottleneck=17: more than the"):
        models.model(run.agreed, shape, shape)
