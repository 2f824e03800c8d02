"""A plan of Scenario II: its parts, its bytes, its pace.

B rows of a batch, b of a micro-batch, L tokens of a row, D width of PLM-S.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.abnet import channels, data, models
from experiments.abnet import config as abnet_config
from nebula_jax import errors
from nebula_jax.communication import codecs
from nebula_jax.models import abnet, abnet_params, mixed_precision
from nebula_jax.parallel import planner
from nebula_jax.training import abnet as abnet_training
from nebula_jax.training import partition
from nebula_jax.training import state as train_state
from scripts.plans import count, means, shapes
from scripts.plans.settings import Settings, check_rows, of_all

SIDES = ("source", "target")


class Traced(NamedTuple):
    """One half of the cut model, as shapes."""

    trained: Any
    frozen: Any
    state: Any
    """A TrainState of the trained parameters."""
    loss: Callable[..., Any]
    """(trained, frozen, *inputs) -> (scalar, hidden states or metrics)."""
    inputs: Callable[[int], tuple[Any, ...]]
    """Number of rows -> ShapeDtypeStructs."""
    differentiated: tuple[int, ...]
    """Arguments of `loss` that get a gradient."""


def translator(
    settings: Settings, most_layers: int = 0, most_pieces: int = 0
) -> tuple[abnet.Config, bool]:
    """Returns the model's shape, and True if PLM-T has an MLM head.

    Args:
      settings: of the plan.
      most_layers, most_pieces: of each half; 0 for all there are.
    """
    agreed, local = settings.run.agreed, settings.run.local
    pair = []
    for flag, name, layers, pieces in (
        ("source_model", local.source_model, local.source_layers, 0),
        (
            *("target_model", local.target_model, local.target_layers),
            settings.target_pieces,
        ),
    ):
        plm = shapes.of(
            *(flag, name),
            dropout=agreed.plm_dropout,
            dtype=agreed.dtype,
            remat=local.remat,
        )
        shapes.check_layers(flag.removesuffix("_model"), layers, plm.config)
        whole = vars(plm.config)
        fields = {
            "layers": min(filter(None, (whole["layers"], layers, most_layers))),
            "vocab_size": min(filter(None, (whole["vocab_size"], pieces, most_pieces))),
        }
        pair.append(plm._replace(config=plm.config.__class__(**whole | fields)))
    source, target = pair
    return models.model(agreed, source.config, target.config), target.has_mlm_head


def possible(settings: Settings) -> tuple[Settings, str]:
    """Returns a plan whose micro-batches can be spread over the devices, and a note.

    Args:
      settings: of the plan; where --micro_batches leaves fewer rows than a cluster has
        devices, the next smaller number that does not is planned with.

    Raises:
      errors.NebulaError: if there is none, or at what a run or a plan cannot have.
    """
    abnet_config.check(of_all(settings.run).with_local(side_dir=""))
    given = settings.run.agreed.micro_batches
    for number in range(given, 0, -1):
        run = settings.run.with_agreed(micro_batches=number)
        tried = dataclasses.replace(settings, run=run)
        try:
            check_rows(tried)
        except errors.SettingsError:
            continue
        note = (
            f"--micro_batches={given} leaves too few rows for so many devices: planned"
            f" with --micro_batches={number}."
        )
        return tried, note if number < given else ""
    check_rows(settings)
    raise AssertionError("1 was tried, so check must have raised")


def rows(agreed: abnet_config.Agreed) -> int:
    """Returns b."""
    return agreed.batch_size // agreed.micro_batches


def most_in_flight(settings: Settings) -> int:
    """Returns how many micro-batches may await their gradient in the source."""
    run = settings.run
    return min(run.local.max_in_flight, run.agreed.micro_batches)


def parts(settings: Settings) -> list[count.Part]:
    """Counts both halves."""
    agreed, found = settings.run.agreed, []
    for side in SIDES:
        half = traced(settings, side)
        arguments = half.trained, half.frozen, *half.inputs(rows(agreed))
        forward = count.flops(half.loss, *arguments)
        whole = count.flops(gradient(half), *arguments)
        found.append(
            count.Part(
                side,
                count.parameters(half.trained),
                count.parameters(half.frozen),
                forward,
                whole - forward,
                memory_of(settings, side)(settings),
            )
        )
    return found


def memory_of(settings: Settings, side: str) -> Callable[[Settings], count.Memory]:
    """Returns the memory of a half's device; see `scripts.plans.m3.memory_of`.

    It is that of all micro-batches that may be in flight.
    """
    local = settings.run.local
    grid = count.grid_of(
        settings.devices[SIDES.index(side)], local.fsdp, local.model_parallel
    )
    half = traced(settings, side)

    def of_rows(number: int) -> tuple[Any, ...]:
        return half.frozen, *half.inputs(number)

    kept = count.activations_of(half.loss, half.trained, of_rows)
    state = (half.state, half.frozen, half.trained)  # the last one: gradients
    of_state = count.bytes_on_device(state, grid)

    def memory(changed: Settings) -> count.Memory:
        of_device = rows(changed.run.agreed) / (grid[0] * grid[1])
        times = most_in_flight(changed) if side == "source" else 1
        return count.Memory(of_state, times * kept(of_device) / grid[2])

    return memory


def gradient(half: Traced) -> Callable[..., Any]:
    """Returns the gradient of a half, of its parameters and of what it received."""
    return jax.grad(half.loss, half.differentiated, has_aux=True)


def traced(
    settings: Settings, side: str, most_layers: int = 0, most_pieces: int = 0
) -> Traced:
    """Returns a half as shapes; for the arguments see `translator`."""
    agreed, local = settings.run.agreed, settings.run.local
    config, has_head = translator(settings, most_layers, most_pieces)
    task = models.make_task(agreed, config)
    key = jax.eval_shape(lambda: jax.random.key(0))
    is_source = side == "source"
    init = abnet_params.init_source if is_source else abnet_params.init_target
    params = jax.eval_shape(functools.partial(init, config), key)
    is_trained = functools.partial(
        abnet_params.is_trained, mlm_head=not (is_source or has_head)
    )
    if local.train_all:
        is_trained = partition.train_all
    trained, frozen = partition.split(params, is_trained)
    plm = config.source if is_source else config.target
    frozen = jax.eval_shape(
        lambda: mixed_precision.cast_kernels(_zeros(frozen), plm.operands)
    )
    optimizer = models.make_optimizer(agreed)
    state = jax.eval_shape(
        lambda: train_state.create(_zeros(trained), optimizer, jax.random.key(0))
    )
    length, width = agreed.length_buckets[-1], config.sent_width

    def batch(number: int) -> Any:
        ids = jax.ShapeDtypeStruct((number, length), jnp.int32)
        each = jax.ShapeDtypeStruct((number,), jnp.int32)
        one = jax.ShapeDtypeStruct((), jnp.float32)
        if is_source:
            return abnet_training.SourceBatch(ids, each, each, one), key
        real = round((1 - settings.padding_share) * length)
        slots = data.slots(np.full(number, real), number, length, agreed.objective)
        return abnet_training.TargetBatch(ids, each, one, slots), key

    if is_source:

        def front(trained: Any, frozen: Any, batch: Any) -> Any:
            params = partition.merge(trained, frozen)
            hidden, loss = abnet_training.front_half(task, params, batch, None)
            return jnp.sum(hidden["hidden"]) + loss, hidden

        return Traced(
            *(trained, frozen, state, front, lambda rows: (batch(rows),)), (0,)
        )

    def back(trained: Any, frozen: Any, floats: Any, rest: Any, batch: Any) -> Any:
        params = partition.merge(trained, frozen)
        hidden = rest | {"hidden": floats}
        return abnet_training.back_half(task, params, hidden, batch, None)

    def received(number: int) -> tuple[Any, ...]:
        rest = dict(spec(number, length, width))
        return rest.pop("hidden"), rest, batch(number)

    return Traced(trained, frozen, state, back, received, (0, 2))


def _zeros(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tree)


def spec(number: int, length: int, width: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the spec of the hidden states of so many rows, as `channels` has it."""

    class Rows(NamedTuple):
        batch_size: int = number
        micro_batches: int = 1

    return channels.hidden_spec(Rows(), length, width)


def trial(
    settings: Settings, side: str, most_layers: int, most_pieces: int
) -> tuple[Callable[[int], Callable[[], Any]], Callable[[int], float], int, float]:
    """Returns a smaller half's step, to be timed; see `scripts.plans.m3.trial`."""
    half = traced(settings, side, most_layers, most_pieces)
    optimizer = models.make_optimizer(settings.run.agreed)

    def step_of(number: int) -> Callable[[], Any]:
        trained, frozen, *inputs = jax.tree.map(
            _ones, (half.trained, half.frozen, *half.inputs(number))
        )
        state = train_state.create(trained, optimizer, jax.random.key(0))

        @functools.partial(jax.jit, donate_argnums=0)
        def step(state: Any, frozen: Any, inputs: Any) -> Any:
            grads, _ = gradient(half)(state.params, frozen, *inputs)
            metrics = {"loss": jnp.zeros(())}
            state, _ = state.apply_gradients(grads[0], optimizer, metrics)
            return state, grads[1:]

        def run() -> Any:
            nonlocal state
            state, rest = step(state, frozen, inputs)
            return state, rest

        return run

    def flops(number: int) -> float:
        return count.flops(
            gradient(half), half.trained, half.frozen, *half.inputs(number)
        )

    whole = traced(settings, side)
    ratio = count.parameters(whole.trained) / count.parameters(half.trained)
    return step_of, flops, settings.run.agreed.batch_size, ratio


def _ones(leaf: Any) -> Any:
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key(0)
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return 0.02 * jax.random.normal(jax.random.key(1), leaf.shape, leaf.dtype)
    return jnp.ones(leaf.shape, leaf.dtype)


def bytes_each_way(
    settings: Settings, codec_texts: tuple[str, str], micro_batches: int
) -> tuple[float, float]:
    """Returns the bytes of a micro-batch on the line, forward and back, with frames.

    They are a mean over the run, of a pair's visits. A
    codec that chooses by the contents is given rows of which --padding_share is
    padding, at the last step; bytes that zstd compresses are counted uncompressed.

    Args:
      settings: of the plan.
      codec_texts: --forward_codec and --backward_codec.
      micro_batches: of a batch.

    Raises:
      errors.SettingsError: if a codec cannot encode what crosses.
    """
    agreed = settings.run.agreed
    length = agreed.length_buckets[-1]
    width = translator(settings)[0].sent_width
    arrays = {
        name: np.zeros(leaf.shape, leaf.dtype)
        for name, leaf in spec(
            agreed.batch_size // micro_batches, length, width
        ).items()
    }
    arrays["mask"][:, : round((1 - settings.padding_share) * length)] = True
    arrays["index"] += np.arange(len(arrays["index"]), dtype=np.int32)
    found = []
    for flag, text in zip(
        ("forward_codec", "backward_codec"), codec_texts, strict=True
    ):
        compression = codecs.from_string(text)
        try:
            found.append(means.frame_bytes(settings.run, compression, arrays))
        except ValueError as error:
            raise errors.SettingsError(f"--{flag}={text}: {error}") from None
    return found[0], found[1]


def pace(
    settings: Settings, compute: dict[str, planner.Compute], lines: planner.Lines
) -> planner.ABNet:
    """Returns the run as the planner takes it; see `scripts.plans.m3.pace`."""
    agreed, local = settings.run.agreed, settings.run.local
    texts = agreed.codec_texts
    return planner.ABNet(
        compute["source"],
        compute["target"],
        lines,
        *bytes_each_way(settings, texts, agreed.micro_batches),
        agreed.micro_batches,
        local.max_in_flight,
    )


def tokens_per_step(settings: Settings) -> float:
    """Returns the source tokens, no padding, that a step trains on."""
    agreed = settings.run.agreed
    real = round((1 - settings.padding_share) * agreed.length_buckets[-1])
    return float(agreed.batch_size * real)
