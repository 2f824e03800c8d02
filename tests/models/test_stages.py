"""A pipeline of layers against the layers one after the other."""

import dataclasses
import functools
import re

import drawn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import trees

from nebula_jax import errors
from nebula_jax.models import transformer
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.parallel.rules import BATCH, REPLICATED, RULES
from nebula_jax.training import m3, m3_steps

MODEL = transformer.Config(96, 2, 32, 4, 64, max_length=16)
ROWS = 16
RANDOM = np.random.RandomState(0)
HIDDEN, TARGET = RANDOM.randn(2, ROWS, 16, 32).astype(np.float32)
MASK = np.arange(16)[None] < RANDOM.randint(5, 17, (ROWS, 1))


@functools.cache
def params(layers):
    encoder = transformer.Encoder(dataclasses.replace(MODEL, layers=layers))
    return {"encoder": drawn.params(encoder, HIDDEN[:1], MASK[:1], True)}


def gradients(config, params, hidden, mask):
    """Gradients of the parameters and of what comes in, and what comes out."""

    def loss(params, hidden):
        out = transformer.Encoder(config).apply(
            {"params": params["encoder"]},
            hidden,
            mask,
            not config.dropout,
            rngs={"dropout": jax.random.key(0)},
        )
        return jnp.sum(out * TARGET) / ROWS, out

    grads, out = jax.grad(loss, argnums=(0, 1), has_aux=True)(params, hidden)
    return *grads, out


@functools.cache
def program(devices, fsdp, **changes):
    """The gradients' compiled program."""
    config = dataclasses.replace(MODEL, **changes)
    step = mesh_lib.jit_step(
        functools.partial(gradients, config),
        mesh_lib.make_mesh(jax.devices()[:devices], fsdp),
        RULES,
        params(config.layers),
        inputs=(BATCH, BATCH),
        outputs=(BATCH, BATCH),
    )
    return step.lower(params(config.layers), HIDDEN, MASK).compile()


def computed(devices, fsdp, **changes):
    given = jax.device_get(params(changes["layers"]))  # a step uses its state up
    return jax.device_get(program(devices, fsdp, **changes)(given, HIDDEN, MASK))


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
    found = computed(devices, fsdp, layers=layers, **changes)
    trees.assert_close(found, computed(1, 1, layers=layers), atol=3e-5)


def test_activations_go_round_and_layers_are_not_gathered():
    text = program(2, 2, layers=2, pipeline=2, remat=False).as_text()
    sent = re.findall(r"= \(?(f32\[\d[\d,]*\])\{.* collective-permute", text)
    assert "f32[8,16,32]" in sent  # a micro-batch
    # And small parameters of one layer, on their way to its stage.
    assert all(each.startswith("f32[1,") for each in set(sent) - {"f32[8,16,32]"})
    gathered = re.findall(r"= \(?(f32\[\d[\d,]*\])\{.* all-gather", text)
    of_layers = {"f32[32,64]", "f32[64,32]", "f32[32,4,8]", "f32[4,8,32]"}
    assert not of_layers & set(gathered)


@pytest.mark.slow
def test_dropout_is_drawn_and_the_same_when_a_step_is_repeated():
    changes = {"layers": 2, "pipeline": 2, "dropout": 0.5}
    dropped = computed(2, 2, **changes)
    trees.assert_same(dropped, computed(2, 2, **changes))
    assert np.abs(dropped[-1] - computed(1, 1, layers=2)[-1]).max() > 0.1


@pytest.mark.parametrize(
    ("devices", "fsdp", "model_parallel", "micro_batches", "message"),
    [
        (4, 1, 1, 4, "pipeline=4 needs fsdp=S with S stages"),
        (4, 2, 2, 4, "there are fsdp=2 and model_parallel=2"),
        (8, 8, 1, 4, "2 layers do not divide over fsdp=8 stages"),
        (2, 2, 1, 3, "pipeline=3 does not divide the 16 rows"),
    ],
)
def test_what_does_not_divide_is_an_error_in_words(
    devices, fsdp, model_parallel, micro_batches, message
):
    """Of a whole model, whose encoder is the pipeline."""
    model = dataclasses.replace(MODEL, pipeline=micro_batches)
    config = m3.Config(model, model, steps=5)
    state = jax.eval_shape(lambda: m3.init_generator(config, 0, 0))
    step = mesh_lib.jit_step(
        functools.partial(m3_steps.generator_step, config),
        mesh_lib.make_mesh(jax.devices()[:devices], fsdp, model_parallel),
        RULES,
        state,
        outputs=(BATCH, REPLICATED),
    )
    with pytest.raises(errors.SettingsError, match=re.escape(message)):
        step.lower(state, jax.ShapeDtypeStruct((ROWS, 16), jnp.int32))


def test_without_a_mesh_the_layers_are_applied_in_turn():
    """By the same program."""
    piped, plain = (
        jax.jit(functools.partial(gradients, dataclasses.replace(MODEL, pipeline=n)))
        .lower(params(2), HIDDEN, MASK)
        .as_text()
        for n in (4, 0)
    )
    assert piped == plain
