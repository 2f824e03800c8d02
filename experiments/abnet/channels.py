"""Everything that crosses in an ABNet run, as one table of channels.

    once        buckets     source -> target  [N] uint8, length bucket of a source row
                lengths     target -> source  [N] int32, tokens of a target row (cmlm)
    a batch     hidden      source -> target  H^E, its mask, the examples' numbers; one
                gradient    target -> source  channel each for every length bucket
    evaluation  evaluation  source -> target  H^E of dev and test sentences, length
                                              logits (cmlm)

Nothing else crosses; the byte ledger counts every frame.

N examples, B rows of a micro-batch (in evaluation, of a batch), L length, D width.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import shared_flags
from experiments.abnet import config as abnet_config
from nebula_jax.communication import channels, codecs, selector
from nebula_jax.communication import codec as codec_lib
from nebula_jax.training import cut

Role = Literal["source", "target"]


class Channel(NamedTuple):
    """One row of the table.

    name: of the channel; unique.
    sender: the role that sends on it; the other one receives.
    spec: of the arrays.
    compression: codec, and level of zstd.
    """

    name: str
    sender: Role
    spec: codec_lib.Spec
    compression: codecs.Compression


class Ends(NamedTuple):
    """One role's ends of all channels: Senders and Receivers.

    lengths is None unless the objective is cmlm; hidden and gradient have one channel
    for each length bucket.
    """

    buckets: Any
    lengths: Any
    hidden: list[Any]
    gradient: list[Any]
    evaluation: Any


def table(examples: int, width: int) -> list[Channel]:
    """Lists the channels, in the order in which both roles open them.

    Args:
      examples: N, of the training set.
      width: D of PLM-S.
    """
    forward, backward = abnet_config.forward_codec(), abnet_config.backward_codec()
    capacities = abnet_config.buckets()
    index = jax.ShapeDtypeStruct((examples,), jnp.uint8)
    lengths = jax.ShapeDtypeStruct((examples,), jnp.int32)
    pack = codecs.Compression(codecs.pack_ids(capacities[-1] + 1))
    spec = evaluation_spec(width)
    rows = [Channel("buckets", "source", index, codecs.Compression(zstd=1))]
    if abnet_config.OBJECTIVE.value == "cmlm":
        rows += [Channel("lengths", "target", lengths, pack)]
    for capacity in capacities:
        hidden = hidden_spec(capacity, width)
        rows += [
            Channel(f"hidden[{capacity}]", "source", hidden, forward),
            Channel(f"gradient[{capacity}]", "target", hidden, backward),
        ]
    evaluation = abnet_config.evaluation_codec(spec)
    return [*rows, Channel("evaluation", "source", spec, evaluation)]


def open_ends(carrier: channels.Carrier, role: Role, examples: int, width: int) -> Ends:
    """Opens one role's ends of all channels.

    Args:
      carrier: to the other cluster.
      role: of this cluster.
      examples: N, of the training set.
      width: D of PLM-S.

    Raises:
      FlagError: if a codec cannot encode what crosses.
    """
    _check_codecs(examples, width)
    ends = {}
    for name, sender, spec, compression in table(examples, width):
        make = carrier.sender if sender == role else carrier.receiver
        ends[name] = make(name, spec, *compression)

    def of_buckets(name: str) -> list[Any]:
        return [ends[f"{name}[{each}]"] for each in abnet_config.buckets()]

    return Ends(
        ends["buckets"],
        ends.get("lengths"),
        of_buckets("hidden"),
        of_buckets("gradient"),
        ends["evaluation"],
    )


def init_codecs(half: cut.Front | cut.Back, width: int) -> list[cut.CodecStates]:
    """Makes the states of a half's codecs, for each length bucket.

    Args:
      half: front or back, with --forward_codec and --backward_codec.
      width: D of PLM-S.
    """
    return [
        half.init_codecs(hidden_spec(capacity, width))
        for capacity in abnet_config.buckets()
    ]


def _check_codecs(examples: int, width: int) -> None:
    """Tries the codecs on the last examples: some choose by the contents."""
    spec = hidden_spec(abnet_config.buckets()[0], width)
    arrays = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), spec)
    arrays["index"] += np.arange(examples - len(arrays["index"]), examples, dtype="i4")
    for flag in (abnet_config.FORWARD_CODEC, abnet_config.BACKWARD_CODEC):
        made = selector.as_selector(codecs.from_string(flag.value).codec)
        try:
            for codec in made.codecs:
                codec_lib.payload_spec(codec, spec)
            made.choose(arrays, made.init(spec), shared_flags.STEPS.value)
        except ValueError as error:
            raise shared_flags.FlagError(
                f"--{flag.name}={flag.value}: {error}"
            ) from None


def hidden_spec(capacity: int, width: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the spec of a micro-batch's H^E, and of its gradient.

    Args:
      capacity: L, of the length bucket.
      width: D of PLM-S.
    """
    rows = shared_flags.BATCH_SIZE.value // abnet_config.MICRO_BATCHES.value
    return _hidden_spec(rows, capacity, width)


def evaluation_spec(width: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the spec of a batch in evaluation."""
    rows, capacity = shared_flags.BATCH_SIZE.value, abnet_config.buckets()[-1]
    spec = _hidden_spec(rows, capacity, width)
    if abnet_config.OBJECTIVE.value == "cmlm":
        # As integers no codec touches them: bits of float32.
        shape = (rows, capacity + 1)
        spec["length_logits"] = jax.ShapeDtypeStruct(shape, jnp.int32)
    return spec


def _hidden_spec(
    rows: int, capacity: int, width: int
) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        "hidden": jax.ShapeDtypeStruct((rows, capacity, width), jnp.float32),
        "mask": jax.ShapeDtypeStruct((rows, capacity), jnp.bool_),
        "index": jax.ShapeDtypeStruct((rows,), jnp.int32),
    }
