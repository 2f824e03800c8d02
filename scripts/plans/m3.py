"""A plan of Scenario I: its parts, its bytes, its pace.

B rows of a generator's micro-batch, K generators.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from experiments.m3 import config as m3_config
from experiments.m3 import models
from nebula_jax import errors
from nebula_jax.commands import command_line
from nebula_jax.communication import codec, codecs
from nebula_jax.communication.wire import frames
from nebula_jax.models import transformer
from nebula_jax.parallel import planner
from nebula_jax.training import m3
from scripts.plans import count, shapes
from scripts.plans.settings import Settings, check_rows

SIDES = ("generators", "discriminator")


def generators(run: m3_config.Run) -> int:
    """Returns K."""
    number = command_line.whole_number(run.agreed.generators)
    return len(run.agreed.groups()) if number is None else number


def model(run: m3_config.Run) -> m3.Config:
    """Returns the configuration of the models, as one batch of one micro-batch."""
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
        small, large = (shapes.of("hot_start", each, **fields) for each in starts)
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
    whole = dataclasses.replace(agreed, micro_batches=1, fan_out=1)
    return m3_config.model(whole, *pair)


def check(settings: Settings) -> None:
    """Checks that there can be such a run, and a plan of it.

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
    # What is given to one cluster does not matter.
    run = settings.run.with_local(
        cluster="all", coordinator="", devices_per_cluster=0, data=""
    )
    if local.of_generator().hot_start and local.of_discriminator().hot_start:
        # Their files need not be here: `model` checks their shapes.
        starts = ("hot_start", "generator_start", "discriminator_start")
        run = run.with_local(**dict.fromkeys(starts, ""))
    m3_config.check(run)
    check_rows(settings)


def halves(settings: Settings) -> list[count.Half]:
    """Traces both models; a micro-batch is B rows, of the discriminator K B."""
    agreed, config = settings.run.agreed, model(settings.run)
    key = jax.eval_shape(lambda: jax.random.key(0))
    generator = jax.eval_shape(lambda: m3.init_generator(config, 0, 0))
    discriminator = jax.eval_shape(lambda: m3.init_discriminator(config, 0))
    added_up = agreed.micro_batches > 1
    held = agreed.fan_out > 1  # in `m3_steps.Begun`
    all_rows = generators(settings.run) * agreed.batch_size

    return [
        count.Half(
            "generators",
            generator.params,
            kept=(generator, [generator.params] * (added_up + held)),
            loss=functools.partial(m3.generator_loss, config),
            inputs=lambda rows: (key, ids(config, rows)),
            rows=agreed.batch_size,
            at_once=agreed.batch_size / agreed.micro_batches,
        ),
        count.Half(
            "discriminator",
            discriminator.params,
            kept=(discriminator, [discriminator.params] * added_up),
            loss=functools.partial(m3.discriminator_loss, config),
            inputs=lambda rows: (key, m3.tokens_spec(config, rows)),
            rows=all_rows,
            at_once=all_rows * agreed.fan_out / agreed.micro_batches,
        ),
    ]


def ids(config: m3.Config, rows: int) -> jax.ShapeDtypeStruct:
    """Returns the spec of a generator's batch."""
    return jax.ShapeDtypeStruct((rows, config.generator.max_length), jnp.int32)


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
