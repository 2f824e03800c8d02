import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import trees

from nebula_jax.models import transformer
from nebula_jax.parallel import fan_out
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.training import m3, m3_steps

B, N, L = 8, 2, 16
# As in test_mesh.py, with which it shares the program that makes parameters.
MODEL = transformer.Config(64, 1, 32, 8, 64, max_length=L, dropout=0.1)
CONFIG = m3.Config(
    MODEL,
    MODEL,
    steps=5,
    learning_rate=1e-3,
    warmup_steps=2,
    fan_out=N,
    micro_batches=2,
)


def text():
    ids = np.random.RandomState(0).randint(5, 64, (N * B, L)).astype(np.int32)
    ids[3, 9:] = 0  # padding
    return ids


@functools.cache
def initial():
    """The states of a generator and a discriminator, in the host's memory."""
    make = jax.jit(
        lambda: (m3.init_generator(CONFIG, 0, 0), m3.init_discriminator(CONFIG, 0))
    )
    return jax.device_get(make())


@functools.cache
def taken():
    """A step on four devices: parameters, tokens of each micro-batch, metrics."""
    mesh = mesh_lib.make_mesh(jax.devices()[:4], fsdp=4)
    start, _ = initial()
    fresh = mesh_lib.sharded_init_from_arrays(mesh, lambda: start)
    step = fan_out.generator_step(CONFIG, mesh, fresh)
    sent = {}
    ids = jax.device_put(text(), mesh_lib.batch_sharding(mesh))
    state, metrics = step(
        fresh.init(), ids, lambda tokens, number: sent.update({number: tokens})
    )
    assert list(sent) == list(range(N))
    return jax.device_get((state.params, list(sent.values()), metrics))


@pytest.mark.slow
def test_a_step_in_pieces_is_the_step_of_the_whole_batch_on_one_device():
    """Each piece in micro-batches again."""
    params, sent, metrics = taken()
    state, tokens, of_whole = jax.jit(m3_steps.generator_step, static_argnums=0)(
        CONFIG, initial()[0], jnp.asarray(text())
    )
    for number, part in enumerate(sent):
        own_rows = jax.tree.map(lambda leaf: leaf[number::N], tokens)  # noqa: B023
        trees.assert_same(part, own_rows)
    trees.assert_close(params, state.params, atol=1e-5)
    for name, value in of_whole.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5)


def test_the_discriminator_joins_what_the_whole_batch_would_be():
    _, sent, _ = taken()
    both = [*sent, *sent[::-1]]  # of two generators
    joined = jax.tree.map(lambda *parts: interleaved(parts), *both)
    trees.assert_same(m3_steps.join(both), joined)


def interleaved(parts):
    whole = np.zeros((len(parts) * B, *parts[0].shape[1:]), parts[0].dtype)
    for number, part in enumerate(parts):
        whole[number :: len(parts)] = part
    return whole
