"""A plan of Scenario I: its parts, its bytes, its pace.

B rows of a generator's micro-batch, K generators.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from experiments import command_line
from experiments.m3 import config as m3_config
from experiments.m3 import models
from nebula_jax import errors
from nebula_jax.communication import codec, codecs
from nebula_jax.communication.wire import frames
from nebula_jax.models import transformer
from nebula_jax.parallel import planner
from nebula_jax.training import m3, m3_steps
from scripts.plans import count, shapes
from scripts.plans.settings import Settings, check_rows, of_all

SIDES = ("generators", "discriminator")


def generators(run: m3_config.Run) -> int:
    """Returns K."""
    number = command_line.whole_number(run.agreed.generators)
    return len(run.agreed.groups()) if number is None else number


def model(run: m3_config.Run, micro_batches: int = 1) -> m3.Config:
    """Returns the configuration of the models, as one batch of one micro-batch.

    Args:
      run: of the experiment.
      micro_batches: parts of a batch whose gradients are added up.
    """
    agreed, local = run.agreed, run.local
    fields = {
        "vocab_size": local.vocab_size,
        "max_length": agreed.max_length,
        "dropout": agreed.dropout,
        "dtype": agreed.dtype,
        "remat": local.remat,
    }
    starts = [
        each.hot_start for each in (local.of_generator(), local.of_discriminator())
    ]
    if all(starts):
        small, large = (
            shapes.of("hot_start", each, **fields).config for each in starts
        )
        of_layers = models.layers(run, small, large)
        shapes.check_layers("generator", of_layers[0], small)
        shapes.check_layers("discriminator", of_layers[1], large)
        pair = [
            dataclasses.replace(shape, layers=layers)
            for shape, layers in zip((small, large), of_layers, strict=True)
        ]
    else:
        pair = [
            transformer.config_of_size(size, layers, **fields)
            for size, layers in (
                (agreed.generator_size, agreed.generator_layers),
                (agreed.discriminator_size, agreed.discriminator_layers),
            )
        ]
    whole = dataclasses.replace(agreed, micro_batches=micro_batches, fan_out=1)
    return m3_config.model(whole, *pair)


def possible(settings: Settings) -> tuple[Settings, str]:
    """Returns a plan that can be made, and no note; see `scripts.plans.abnet`.

    Raises:
      errors.NebulaError: at no generator, or at what a run or a plan cannot have.
    """
    agreed, local = settings.run.agreed, settings.run.local
    if agreed.generators.startswith("-") or not generators(settings.run):
        raise errors.SettingsError(
            f"--generators={agreed.generators}: expected a number from 1, or their"
            ' languages, as in "en de|hi ur"'
        )
    if local.pipeline:
        raise errors.SettingsError(
            f"--pipeline={local.pipeline}: a plan has no pipeline, in which devices"
            " wait for each other"
        )
    if local.emulate_compute:
        given = ",".join(map(str, local.emulate_compute))
        raise errors.SettingsError(
            f"--emulate_compute={given}: a plan is of the run's own models, without"
            " sleeps"
        )
    run = of_all(settings.run)
    if local.of_generator().hot_start and local.of_discriminator().hot_start:
        # Their files need not be here: `model` checks their shapes.
        starts = ("hot_start", "generator_start", "discriminator_start")
        run = run.with_local(**dict.fromkeys(starts, ""))
    m3_config.check(run)
    check_rows(settings)
    return settings, ""


def parts(settings: Settings) -> list[count.Part]:
    """Counts both models; a micro-batch is B rows, of the discriminator K B."""
    run = settings.run
    config, found = model(run), []
    for side, every in zip(SIDES, (1, generators(run)), strict=True):
        state, loss, inputs = _traced(config, side)
        arguments = state.params, *inputs(every * run.agreed.batch_size)
        forward = count.flops(loss, *arguments)
        whole = count.flops(jax.grad(loss, has_aux=True), *arguments)
        found.append(
            count.Part(
                side,
                count.parameters(state.params),
                0,
                forward,
                whole - forward,
                memory_of(settings, side)(settings),
            )
        )
    return found


def memory_of(settings: Settings, side: str) -> Callable[[Settings], count.Memory]:
    """Returns the memory of a model's device, traced once.

    Args:
      settings: of the plan.
      side: one of SIDES.

    Returns:
      A plan with other --micro_batches or --max_in_flight -> its memory.
    """
    run = settings.run
    grid = count.grid_of(
        *(settings.devices[SIDES.index(side)], run.local.fsdp),
        run.local.model_parallel,
    )
    state, loss, inputs = _traced(model(run), side)
    kept = count.activations_of(loss, state.params, inputs)
    of_state = count.bytes_on_device(state, grid)
    accumulated = count.bytes_on_device(state.params, grid)
    at_once, held = run.agreed.batch_size, 0
    if side == "discriminator":
        at_once *= generators(run) * run.agreed.fan_out
    else:
        held = run.agreed.fan_out > 1  # in `m3_steps.Begun`

    def memory(changed: Settings) -> count.Memory:
        number = changed.run.agreed.micro_batches
        working = kept(at_once / number / (grid[0] * grid[1])) / grid[2]
        sums = held + (number > 1)
        return count.Memory(of_state, working + accumulated * sums)

    return memory


def _traced(
    config: m3.Config, side: str
) -> tuple[Any, Callable[..., Any], Callable[[int], tuple[Any, ...]]]:
    """Returns a model's state, its loss, and the loss's inputs by number of rows."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    if side == "generators":
        state = jax.eval_shape(lambda: m3.init_generator(config, 0, 0))
        loss = functools.partial(m3.generator_loss, config)
        return state, loss, lambda rows: (key, ids(config, rows))
    state = jax.eval_shape(lambda: m3.init_discriminator(config, 0))
    loss = functools.partial(m3.discriminator_loss, config)
    return state, loss, lambda rows: (key, m3.tokens_spec(config, rows))


def ids(config: m3.Config, rows: int) -> jax.ShapeDtypeStruct:
    """Returns the spec of a generator's batch."""
    return jax.ShapeDtypeStruct((rows, config.generator.max_length), jnp.int32)


def trial(
    settings: Settings, side: str, most_layers: int, most_pieces: int
) -> tuple[Callable[[int], Callable[[], Any]], Callable[[int], float], int, float]:
    """Returns a smaller model's step, to be timed.

    Args:
      settings: of the plan.
      side: one of SIDES.
      most_layers, most_pieces: of the model.

    Returns:
      number of rows -> the step; number of rows -> its FLOPs; the rows of the run; the
      parameters of the run's model over this one's.
    """
    whole = model(settings.run)
    config = dataclasses.replace(
        whole,
        **{
            name: dataclasses.replace(
                each,
                layers=min(each.layers, most_layers),
                vocab_size=min(each.vocab_size, most_pieces),
            )
            for name, each in (
                ("generator", whole.generator),
                ("discriminator", whole.discriminator),
            )
        },
    )
    shapes_of, loss, inputs = _traced(config, side)
    is_generator = side == "generators"

    def step_of(rows: int) -> Callable[[], Any]:
        init = m3.init_generator if is_generator else m3.init_discriminator
        state = jax.jit(lambda: init(config, 0, *((0,) if is_generator else ())))()
        batch = jax.random.randint(
            jax.random.key(1), ids(config, rows).shape, 5, config.generator.vocab_size
        )
        fn = m3_steps.generator_step
        if not is_generator:
            fn = m3_steps.discriminator_step
            masked = jnp.arange(batch.shape[1]) < config.capacity
            masked = jnp.broadcast_to(masked, batch.shape)
            batch = [m3.Tokens(batch, masked, batch[:, : config.capacity])]
        step = jax.jit(functools.partial(fn, config), donate_argnums=0)

        def run() -> Any:
            nonlocal state
            state, *rest = step(state, batch)
            return state, rest

        return run

    def flops(rows: int) -> float:
        return count.flops(
            jax.grad(loss, has_aux=True), shapes_of.params, *inputs(rows)
        )

    of_run = _traced(whole, side)[0].params
    every = 1 if is_generator else generators(settings.run)
    ratio = count.parameters(of_run) / count.parameters(shapes_of.params)
    return step_of, flops, every * settings.run.agreed.batch_size, ratio


def message_bytes(run: m3_config.Run) -> int:
    """Returns the bytes of a micro-batch on the line: Tokens, packed, in a frame."""
    spec = m3.tokens_spec(model(run), run.agreed.batch_size)
    payload = codec.payload_spec(codecs.pack_ids(run.local.vocab_size), spec)
    return frames.frame_bytes(frames.Tensor, codec.nbytes(payload))


def pace(
    settings: Settings, compute: dict[str, planner.Compute], lines: planner.Lines
) -> planner.M3:
    """Returns the run as the planner takes it.

    Args:
      settings: of the plan.
      compute: of a micro-batch, by side.
      lines: between every generator and the discriminator.
    """
    run, number = settings.run, generators(settings.run)
    return planner.M3(
        (compute["generators"],) * number,
        compute["discriminator"],
        (lines,) * number,
        message_bytes(run),
        run.agreed.window,
        run.agreed.fan_out,
    )


def tokens_per_step(settings: Settings) -> float:
    """Returns the tokens that a step trains on."""
    run = settings.run
    rows = generators(run) * run.agreed.fan_out * run.agreed.batch_size
    return float(rows * run.agreed.max_length)
