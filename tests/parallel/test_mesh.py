import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from nebula_jax import errors
from nebula_jax.models import transformer
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.training import m3


def model():
    return transformer.Config(
        vocab_size=64,
        layers=1,
        width=32,
        heads=4,
        feed_forward=64,
        max_length=16,
        dropout=0.1,
    )


CONFIG = m3.Config(model(), model(), steps=5, learning_rate=1e-3, warmup_steps=2)


def test_axes_are_data_and_model():
    mesh = mesh_lib.make_mesh(jax.devices(), model_parallel=2)
    assert mesh.shape == {"data": 2, "model": 2}
    with pytest.raises(errors.NebulaError, match="--model_parallel=3"):
        mesh_lib.make_mesh(jax.devices(), model_parallel=3)


def specs(tree, model_parallel=2):
    mesh = mesh_lib.make_mesh(jax.devices(), model_parallel)
    sharding = mesh_lib.state_sharding(mesh, mesh_lib.ENCODER_RULES, tree)
    return jax.tree.map(lambda leaf: leaf.spec, sharding)


def test_parameters_and_their_moments_are_split_alike():
    state = jax.eval_shape(lambda: m3.init_discriminator(CONFIG, 0))
    found = specs(state)
    block = found.params["encoder"]["layer_0"]
    assert block["attention"]["query"]["kernel"] == PartitionSpec(None, "model", None)
    assert block["intermediate"]["kernel"] == PartitionSpec(None, "model")
    assert block["output"]["kernel"] == PartitionSpec("model", None)
    assert block["output"]["bias"] == PartitionSpec()
    table = found.params["embeddings"]["word_embeddings"]["embedding"]
    assert table == PartitionSpec("model", None)
    moments = found.opt_state[1].mu
    assert jax.tree.leaves(moments) == jax.tree.leaves(found.params)
    assert found.step == PartitionSpec()


def test_an_axis_that_does_not_divide_stays_whole():
    tree = {"word_embeddings": {"embedding": jnp.zeros((63, 8))}}
    assert specs(tree)["word_embeddings"]["embedding"] == PartitionSpec(None, None)


@functools.cache
def init():
    """States of the two sides of M3, in the host's memory."""
    make = jax.jit(
        lambda: (m3.init_generator(CONFIG, 0, 0), m3.init_discriminator(CONFIG, 0))
    )
    return jax.device_get(make())


def train(devices, model_parallel, steps=3):
    """The two sides of M3 on a mesh; final parameters and losses."""
    mesh = mesh_lib.make_mesh(jax.devices()[:devices], model_parallel)
    states = []
    for state in init():
        rules = mesh_lib.ENCODER_RULES
        states.append(
            jax.device_put(state, mesh_lib.state_sharding(mesh, rules, state))
        )
    at = [jax.tree.map(lambda leaf: leaf.sharding, state) for state in states]
    generator_step = mesh_lib.jit_step(
        functools.partial(m3.generator_step, CONFIG),
        at[0],
        outputs=(mesh_lib.BATCH, mesh_lib.REPLICATED),
    )
    discriminator_step = mesh_lib.jit_step(
        functools.partial(m3.discriminator_step, CONFIG), at[1]
    )
    random = np.random.RandomState(0)
    for _ in range(steps):
        ids = random.randint(5, 64, (8, 16)).astype(np.int32)
        ids = jax.device_put(ids, mesh_lib.batch_sharding(mesh))
        states[0], tokens, _ = generator_step(states[0], ids)
        states[1], metrics = discriminator_step(states[1], [tokens, tokens])
    return jax.device_get([state.params for state in states]), jax.device_get(metrics)


@pytest.fixture(scope="module")
def on_one_device():
    return train(1, 1)


@pytest.mark.parametrize("model_parallel", [1, 2, 4])
def test_four_devices_compute_what_one_does(on_one_device, model_parallel):
    params, metrics = train(4, model_parallel)
    # Sums in another order: Adam turns rounding of tiny gradients into 1e-6 of a step
    # of 1e-3, dropout and sampling draw the same bits on any mesh.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5),
        params,
        on_one_device[0],
    )
    np.testing.assert_allclose(metrics["loss"], on_one_device[1]["loss"], rtol=1e-5)


def toy_step(weights, batch, scale):
    """A step with one state, two inputs and two outputs."""
    loss = jnp.mean(batch) * scale
    return weights + loss, batch * 2, loss


def toy_sharding(spec):
    mesh = mesh_lib.make_mesh(jax.devices(), model_parallel=2)
    return jax.sharding.NamedSharding(mesh, spec)


@pytest.mark.parametrize("donate", [True, False])
def test_a_jitted_step_puts_everything_where_it_is_said_to_be(donate):
    split = toy_sharding(PartitionSpec("model"))
    step = mesh_lib.jit_step(
        toy_step,
        split,
        inputs=(mesh_lib.BATCH, toy_sharding(mesh_lib.REPLICATED)),
        outputs=(mesh_lib.BATCH, mesh_lib.REPLICATED),
        donate=donate,
    )
    weights = jax.device_put(jnp.arange(8.0), split)
    found, doubled, loss = step(weights, np.ones((4, 2), np.float32), np.float32(3))
    np.testing.assert_array_equal(found, np.arange(8.0) + 3)
    np.testing.assert_array_equal(doubled, np.full((4, 2), 2))
    assert found.sharding.spec == PartitionSpec("model")
    assert doubled.sharding.spec == PartitionSpec("data")
    assert loss.sharding.spec == PartitionSpec()
    assert weights.is_deleted() == donate


def test_a_step_without_outputs_returns_its_state_alone():
    split = toy_sharding(PartitionSpec("model"))
    step = mesh_lib.jit_step(
        lambda weights, update: weights + update, split, outputs=()
    )
    found = step(jax.device_put(jnp.zeros(8), split), np.full(8, 4, np.float32))
    np.testing.assert_array_equal(found, np.full(8, 4))
    assert found.sharding.spec == PartitionSpec("model")


def table(vocabulary):
    return {"word_embeddings": {"embedding": vocabulary}}


@pytest.mark.parametrize(
    "plan", [mesh_lib.sharded_init, mesh_lib.sharded_init_from_arrays]
)
def test_a_state_is_made_in_its_place(plan):
    mesh = mesh_lib.make_mesh(jax.devices(), model_parallel=2)
    arrays = table(jnp.arange(32.0).reshape(8, 4))
    planned = plan(mesh, lambda: arrays)
    made = planned.init()
    jax.tree.map(np.testing.assert_array_equal, made, arrays)
    assert jax.tree.map(lambda leaf: leaf.sharding, made) == planned.sharding
    assert planned.shapes == jax.eval_shape(lambda: arrays)
    jax.tree.map(lambda leaf: leaf.delete(), made)  # as a step does that donates it
    jax.tree.map(np.asarray, arrays)
