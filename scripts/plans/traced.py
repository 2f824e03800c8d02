"""Both models of M3, traced: operations, bytes and speed. No weights are made.

B rows of a generator's micro-batch, K generators.
"""

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from experiments.m3 import config as m3_config
from experiments.m3 import models
from experiments.pretraining import hot_start
from nebula_jax.commands import command_line
from nebula_jax.communication import codec, codecs
from nebula_jax.communication.wire import frames
from nebula_jax.models import activations, transformer
from nebula_jax.models.pretrained import config_json
from nebula_jax.models.pretrained import folder as checkpoint_folder
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.parallel import rules
from nebula_jax.training import m3
from scripts.bench import harness

MOST_FLOP = 2e10  # of what is timed: at most a second on a slow laptop
TIMED_STEPS = 10


@dataclasses.dataclass(frozen=True)
class Part:
    """One cluster's part of the model as shapes, and what a step computes of it."""

    name: str
    params: Any  # those that train, ShapeDtypeStructs
    kept: Any  # what devices hold between steps, and gradients that are added up
    loss: Callable[..., Any]  # (params, *inputs) -> (scalar, anything)
    inputs: Callable[[int], tuple[Any, ...]]  # number of rows -> ShapeDtypeStructs
    rows: int  # of a micro-batch on the line

    @property
    def gradient(self) -> Any:
        """The gradient of `loss` in the parameters, to be compiled."""
        return jax.jit(jax.grad(self.loss, has_aux=True))

    def flops(self, rows: int) -> float:
        """Counts the operations of a gradient of so many rows, as XLA does."""
        traced = self.gradient.lower(self.params, *self.inputs(rows))
        return float(traced.cost_analysis()["flops"])


def parts(run: m3_config.Run) -> tuple[Part, Part]:
    """Traces the generator and the discriminator, whose micro-batch is K B rows."""
    agreed, config = run.agreed, model(run)
    key = jax.eval_shape(lambda: jax.random.key(0))
    generator = jax.eval_shape(lambda: m3.init_generator(config, 0, 0))
    discriminator = jax.eval_shape(lambda: m3.init_discriminator(config, 0))
    added_up = agreed.micro_batches > 1
    held = agreed.fan_out > 1  # in `m3_steps.Begun`
    return (
        Part(
            "generators",
            generator.params,
            kept=(generator, [generator.params] * (added_up + held)),
            loss=functools.partial(m3.generator_loss, config),
            inputs=lambda rows: (
                key,
                jax.ShapeDtypeStruct((rows, config.generator.max_length), jnp.int32),
            ),
            rows=agreed.batch_size,
        ),
        Part(
            "discriminator",
            discriminator.params,
            kept=(discriminator, [discriminator.params] * added_up),
            loss=functools.partial(m3.discriminator_loss, config),
            inputs=lambda rows: (key, m3.tokens_spec(config, rows)),
            rows=generators(run) * agreed.batch_size,
        ),
    )


def generators(run: m3_config.Run) -> int:
    """Returns K."""
    number = command_line.whole_number(run.agreed.generators)
    return len(run.agreed.groups()) if number is None else number


def model(run: m3_config.Run) -> m3.Config:
    """Returns the configuration of the models, as one batch of one micro-batch."""
    agreed, local = run.agreed, run.local
    starts = local.of_generator(), local.of_discriminator()
    if starts[0].hot_start:
        small, large = map(_shape, starts)
        of_layers = models.layers(run, small, large)
        fields: dict[str, Any] = {
            "vocab_size": local.vocab_size,
            "max_length": agreed.max_length,
            "dropout": agreed.dropout,
            "dtype": agreed.dtype,
            "remat": local.remat,
        }
        pair = tuple(
            dataclasses.replace(shape, layers=layers, **fields)
            for shape, layers in zip((small, large), of_layers, strict=True)
        )
    else:
        pair = models.of_sizes(run, local.vocab_size)
    whole = dataclasses.replace(agreed, micro_batches=1, fan_out=1)
    return m3_config.model(whole, *pair)


def _shape(local: m3_config.Local) -> transformer.Config:
    """Returns the shape of --hot_start."""
    there = hot_start.folder(local)
    about = checkpoint_folder.read_config(there)
    return config_json.read(about, there / checkpoint_folder.CONFIG)[1]


def message_bytes(run: m3_config.Run) -> int:
    """Returns the bytes of a micro-batch on the line: Tokens, packed, in a frame."""
    spec = m3.tokens_spec(model(run), run.agreed.batch_size)
    payload = codec.payload_spec(codecs.pack_ids(run.local.vocab_size), spec)
    return frames.frame_bytes(frames.Tensor, codec.nbytes(payload))


def count(tree: Any) -> int:
    """Counts the values of a tree of shapes."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def bytes_on_device(
    tree: Any, devices: int, fsdp: int = 1, model_parallel: int = 1
) -> float:
    """Returns how many bytes of a tree of ShapeDtypeStructs each device holds.

    Raises errors.SettingsError if `fsdp` and `model_parallel`, as the mesh's flags, do
    not divide the devices or what is split.
    """
    mesh_lib.check(devices, fsdp, model_parallel)
    grid = devices // (fsdp * model_parallel), fsdp, model_parallel
    mesh = jax.sharding.AbstractMesh(grid, activations.AXES)
    places = rules.shardings(mesh, rules.RULES, tree)
    shards = [
        jax.ShapeDtypeStruct(place.shard_shape(leaf.shape), leaf.dtype)
        for leaf, place in zip(
            jax.tree.leaves(tree), jax.tree.leaves(places), strict=True
        )
        # Keys of random numbers are small, and of no size that is known.
        if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended)
    ]
    return float(codec.nbytes(shards))


def measure(part: Part) -> float:
    """Returns the operations a second of a device here, in gradients of some rows."""
    rows = max(1, min(part.rows, int(MOST_FLOP / (part.flops(8) / 8))))
    arguments = jax.tree.map(_filled, (part.params, *part.inputs(rows)))
    gradient = part.gradient
    times = harness.time_runs({"gradient": lambda: gradient(*arguments)}, TIMED_STEPS)
    return part.flops(rows) / statistics.median(times["gradient"])


def _filled(leaf: Any) -> Any:
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key(0)
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return 0.02 * jax.random.normal(jax.random.key(1), leaf.shape, leaf.dtype)
    return jnp.ones(leaf.shape, leaf.dtype)
