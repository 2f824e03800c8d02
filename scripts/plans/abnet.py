"""A plan of Scenario II: its parts, its bytes, its pace.

B rows of a batch, b of a micro-batch, L tokens of a row, D width of PLM-S.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.abnet import channels, data, models
from experiments.abnet import config as abnet_config
from nebula_jax import errors
from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication import codecs, selector
from nebula_jax.communication.wire import frames
from nebula_jax.models import abnet, abnet_params, mixed_precision
from nebula_jax.parallel import planner
from nebula_jax.training import abnet as abnet_training
from nebula_jax.training import partition
from nebula_jax.training import state as train_state
from scripts.plans import count, shapes
from scripts.plans.settings import Settings, check_rows, of_all

SIDES = ("source", "target")


def translator(settings: Settings) -> tuple[abnet.Config, bool]:
    """Returns the model's shape, and True if PLM-T has an MLM head."""
    agreed, local = settings.run.agreed, settings.run.local
    pair = []
    for flag, name, layers in (
        ("source_model", local.source_model, local.source_layers),
        ("target_model", local.target_model, local.target_layers),
    ):
        plm = shapes.of(
            flag,
            name,
            dropout=agreed.plm_dropout,
            dtype=agreed.dtype,
            remat=local.remat,
        )
        shapes.check_layers(flag.removesuffix("_model"), layers, plm.config)
        fields = vars(plm.config) | {"layers": layers or plm.config.layers}
        pair.append(plm._replace(config=plm.config.__class__(**fields)))
    source, target = pair
    return models.model(agreed, source.config, target.config), target.has_mlm_head


def check(settings: Settings) -> None:
    """Checks that there can be such a run, and a plan of it.

    Raises:
      errors.NebulaError: at what a run or a plan cannot have.
    """
    abnet_config.check(of_all(settings.run).with_local(side_dir=""))
    check_rows(settings)


def rows(agreed: abnet_config.Agreed) -> int:
    """Returns b."""
    return agreed.batch_size // agreed.micro_batches


def halves(settings: Settings) -> list[count.Half]:
    """Traces both halves."""
    agreed, config = settings.run.agreed, translator(settings)[0]
    task = models.make_task(agreed, config)
    key = jax.eval_shape(lambda: jax.random.key(0))
    length, width = agreed.length_buckets[-1], config.sent_width
    one = jax.ShapeDtypeStruct((), jnp.float32)

    def batches(number: int) -> tuple[Any, Any]:
        ids = jax.ShapeDtypeStruct((number, length), jnp.int32)
        each = jax.ShapeDtypeStruct((number,), jnp.int32)
        real = round((1 - settings.padding_share) * length)
        slots = data.slots(np.full(number, real), number, length, agreed.objective)
        source = abnet_training.SourceBatch(ids, each, each, one)
        return source, abnet_training.TargetBatch(ids, each, one, slots)

    def front(trained: Any, frozen: Any, batch: Any) -> Any:
        params = partition.merge(trained, frozen)
        hidden, loss = abnet_training.front_half(task, params, batch, None)
        return jnp.sum(hidden["hidden"]) + loss, hidden

    def back(trained: Any, frozen: Any, floats: Any, rest: Any, batch: Any) -> Any:
        params = partition.merge(trained, frozen)
        hidden = rest | {"hidden": floats}
        return abnet_training.back_half(task, params, hidden, batch, None)

    def received(number: int) -> tuple[Any, ...]:
        rest = dict(spec(number, length, width))
        return rest.pop("hidden"), rest, (batches(number)[1], key)

    source, target = (_parameters(settings, side) for side in SIDES)
    count_of = {"rows": rows(agreed), "at_once": rows(agreed)}
    return [
        count.Half(
            "source",
            *source,
            loss=front,
            inputs=lambda number: ((batches(number)[0], key),),
            # Micro-batches that may await their gradient.
            times=min(settings.run.local.max_in_flight, agreed.micro_batches),
            **count_of,
        ),
        count.Half(
            "target",
            *target,
            loss=back,
            inputs=received,
            differentiated=(0, 2),
            **count_of,
        ),
    ]


def _parameters(settings: Settings, side: str) -> tuple[Any, Any, Any]:
    """Returns a half's trained and frozen parameters, and what its devices keep."""
    agreed, local = settings.run.agreed, settings.run.local
    config, has_head = translator(settings)
    is_source = side == "source"
    init = abnet_params.init_source if is_source else abnet_params.init_target
    key = jax.eval_shape(lambda: jax.random.key(0))
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
    return trained, frozen, (state, frozen, trained)  # the last one: gradients


def _zeros(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tree)


def spec(number: int, length: int, width: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the spec of the hidden states of so many rows, as `channels` has it."""

    class Rows(NamedTuple):
        batch_size: int = number
        micro_batches: int = 1

    return channels.hidden_spec(Rows(), length, width)


def bytes_each_way(
    settings: Settings, codec_texts: tuple[str, str], micro_batches: int
) -> tuple[float, float]:
    """Returns the bytes of a micro-batch on the line, forward and back, with frames.

    They are those of the last step. A codec that chooses by the contents is given rows
    of which --padding_share is padding; a memory has seen every pair; bytes that zstd
    compresses are counted uncompressed.

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
        codec = codecs.from_string(text)
        try:
            found.append(_frame_bytes(agreed, codec, arrays))
        except ValueError as error:
            raise errors.SettingsError(f"--{flag}={text}: {error}") from None
    return found[0], found[1]


def _frame_bytes(
    agreed: abnet_config.Agreed, codec: selector.CodecOrSelector, arrays: Any
) -> float:
    """Returns the bytes of a micro-batch's frame.

    Raises:
      ValueError: if the codec cannot encode the arrays.
    """
    made = selector.as_selector(codec)
    state = jax.tree.map(_visited, jax.eval_shape(made.init, arrays))
    option = made.choose(arrays, state, agreed.steps)
    payload = codec_lib.payload_spec(made.codecs[option], arrays)
    return frames.frame_bytes(frames.Tensor, codec_lib.nbytes(payload))


def _visited(leaf: Any) -> Any:
    """Fills an array of a codec's state, without its memory: `delta`'s may be large.

    Booleans are there in `delta` alone: the pairs that were visited.
    """
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
        return leaf
    value = np.asarray(leaf.dtype == jnp.bool_, leaf.dtype)
    return np.broadcast_to(value, leaf.shape)


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
