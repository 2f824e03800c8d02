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


def train(devices, model_parallel, steps=3):
    """The two sides of M3 on a mesh; final parameters and losses."""
    mesh = mesh_lib.make_mesh(jax.devices()[:devices], model_parallel)
    batch_at, everywhere = mesh_lib.batch_sharding(mesh), mesh_lib.replicated(mesh)
    generator = m3.init_generator(CONFIG, 0, 0)
    discriminator = m3.init_discriminator(CONFIG, 0)
    states = []
    for state in (generator, discriminator):
        rules = mesh_lib.ENCODER_RULES
        states.append(
            jax.device_put(state, mesh_lib.state_sharding(mesh, rules, state))
        )
    at = [jax.tree.map(lambda leaf: leaf.sharding, state) for state in states]
    generator_step = jax.jit(
        m3.generator_step,
        static_argnums=0,
        in_shardings=(at[0], batch_at),
        out_shardings=(at[0], batch_at, everywhere),
        donate_argnums=1,
    )
    discriminator_step = jax.jit(
        m3.discriminator_step,
        static_argnums=0,
        in_shardings=(at[1], batch_at),
        out_shardings=(at[1], everywhere),
        donate_argnums=1,
    )
    random = np.random.RandomState(0)
    for _ in range(steps):
        ids = random.randint(5, 64, (8, 16)).astype(np.int32)
        ids = jax.device_put(ids, batch_at)
        states[0], tokens, _ = generator_step(CONFIG, states[0], ids)
        states[1], metrics = discriminator_step(CONFIG, states[1], [tokens, tokens])
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
