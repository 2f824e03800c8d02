"""A pipeline of layers against the layers one after the other."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nebula_jax import errors
from nebula_jax.models import transformer
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.parallel.rules import BATCH, RULES
from nebula_jax.training import m3, m3_predictions, m3_steps

MODEL = transformer.Config(96, 2, 32, 4, 64, max_length=16)
ROWS = 16


def config(**changes):
    model = dataclasses.replace(MODEL, **changes)
    return m3.Config(model, model, steps=5, learning_rate=1e-3, warmup_steps=2)


def text():
    ids = np.random.RandomState(0).randint(5, 64, (ROWS, 16)).astype(np.int32)
    ids[::3, 9:] = 0  # padding
    return ids


@functools.cache
def initial(layers=MODEL.layers):
    """A generator's state, of all configurations here, in the host's memory."""
    make = jax.jit(lambda: m3.init_generator(config(layers=layers), 0, 0))
    return jax.device_get(make())


def compiled(given, devices, fsdp, model_parallel=1):
    """A generator's state and step on a mesh."""
    mesh = mesh_lib.make_mesh(jax.devices()[:devices], fsdp, model_parallel)
    state = initial(given.generator.layers)
    fresh = mesh_lib.sharded_init_from_arrays(mesh, lambda: state)
    step = mesh_lib.jit_step(
        functools.partial(m3_steps.generator_step, given),
        mesh,
        RULES,
        fresh.shapes,
        outputs=(BATCH, mesh_lib.REPLICATED),
    )
    batch = jax.device_put(text(), mesh_lib.batch_sharding(mesh))
    return fresh.init(), step, batch


@functools.cache
def program(devices, fsdp, **changes):
    """A state, the compiled step and its batch."""
    state, step, batch = compiled(config(**changes), devices, fsdp)
    return state, step.lower(state, batch).compile(), batch


def trained(devices, fsdp, **changes):
    state, step, batch = program(devices, fsdp, **changes)
    state = jax.tree.map(jnp.copy, state)  # a step uses it up
    for _ in range(2):
        state, tokens, metrics = step(state, batch)
    return jax.device_get((state.params, tokens, metrics["loss"]))


@pytest.mark.parametrize(
    ("devices", "fsdp", "layers", "micro_batches", "remat"),
    [
        pytest.param(4, 4, 4, 8, True, marks=pytest.mark.slow),
        pytest.param(8, 2, 4, 2, False, marks=pytest.mark.slow),
        (2, 2, 2, 2, False),
    ],
)
def test_a_pipeline_computes_what_the_layers_in_turn_do(
    devices, fsdp, layers, micro_batches, remat
):
    changes = {"pipeline": micro_batches, "remat": remat}
    found = trained(devices, fsdp, layers=layers, **changes)
    one = trained(1, 1, layers=layers)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, one)


def test_activations_go_round_and_layers_are_not_gathered():
    text = program(2, 2, layers=2, pipeline=2, remat=False)[1].as_text()
    sent = re.findall(r"= \(?(f32\[\d[\d,]*\])\{.* collective-permute", text)
    assert "f32[8,16,32]" in sent  # a micro-batch
    # And small parameters of one layer, on their way to its stage.
    assert all(each.startswith("f32[1,") for each in set(sent) - {"f32[8,16,32]"})
    gathered = re.findall(r"= \(?(f32\[\d[\d,]*\])\{.* all-gather", text)
    of_layers = {"f32[32,64]", "f32[64,32]", "f32[32,4,8]", "f32[4,8,32]"}
    assert not of_layers & set(gathered)


@pytest.mark.slow
def test_dropout_is_drawn_and_the_same_when_a_step_is_repeated():
    dropped = trained(2, 2, layers=2, pipeline=2, dropout=0.5)
    again = trained(2, 2, layers=2, pipeline=2, dropout=0.5)
    jax.tree.map(np.testing.assert_array_equal, dropped, again)
    assert abs(dropped[2] - trained(1, 1, layers=2)[2]) > 1e-3


@pytest.mark.parametrize(
    ("devices", "fsdp", "model_parallel", "changes", "message"),
    [
        (4, 1, 1, {"pipeline": 4}, "pipeline=4 needs fsdp=S with S stages"),
        (4, 2, 2, {"pipeline": 4}, "there are fsdp=2 and model_parallel=2"),
        (8, 8, 1, {"pipeline": 4}, "2 layers do not divide over fsdp=8 stages"),
        (2, 2, 1, {"pipeline": 3}, "pipeline=3 does not divide the 16 rows"),
    ],
)
def test_what_does_not_divide_is_an_error_in_words(
    devices, fsdp, model_parallel, changes, message
):
    state, step, batch = compiled(config(**changes), devices, fsdp, model_parallel)
    with pytest.raises(errors.SettingsError, match=re.escape(message)):
        step.lower(state, batch)


def test_without_a_mesh_the_layers_are_applied_in_turn():
    corrupt = jax.jit(m3_predictions.corrupt, static_argnums=0)
    piped, plain = (
        corrupt(each, initial().params, jax.random.key(0), jnp.asarray(text()))
        for each in (config(pipeline=4), config())
    )
    jax.tree.map(np.testing.assert_array_equal, piped, plain)
