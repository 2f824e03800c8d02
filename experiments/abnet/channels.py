"""What crosses in an ABNet run: the channels, opened in the same order on both sides.

    once        buckets    S -> T   [N] uint8, how long each source sentence is, roughly
                lengths    T -> S   [N] int32, tokens of each target row (cmlm only)
    a batch     hidden     S -> T   H^E, its mask, the examples' numbers; one channel
                gradient   T -> S   for each length bucket
    evaluation  judged     S -> T   H^E of dev and test sentences, length logits (cmlm)

Nothing else does; the byte ledger counts every frame.
"""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from experiments import shared_flags
from experiments.abnet import config as abnet_config
from nebula_jax.communication import channels, codecs
from nebula_jax.communication import codec as codec_lib


class Carrier(Protocol):
    """A link or a loopback."""

    def sender(self, name: str, spec: Any, codec: Any) -> channels.Sender:
        """A channel for arrays like `spec`."""

    def receiver(
        self, name: str, spec: Any, codec: Any, sharding: Any = None
    ) -> channels.Receiver:
        """The other end of the peer's next channel."""


class Near(NamedTuple):
    """The source cluster's ends."""

    buckets: channels.Sender
    lengths: channels.Receiver | None
    hidden: list[channels.Sender]
    gradient: list[channels.Receiver]
    judged: channels.Sender


class Far(NamedTuple):
    """The target cluster's ends."""

    buckets: channels.Receiver
    lengths: channels.Sender | None
    hidden: list[channels.Receiver]
    gradient: list[channels.Sender]
    judged: channels.Receiver


def open_near(carrier: Carrier, examples: int, width: int) -> Near:
    """Opens the source cluster's ends.

    Args:
      carrier: to the target cluster.
      examples: N, of the training set.
      width: D of PLM-S.

    Raises:
      FlagError: if a codec is not for what crosses.
    """
    _check_codecs(examples, width)
    buckets = carrier.sender("buckets", _buckets(examples), codecs.zstd())
    lengths = None
    if abnet_config.OBJECTIVE.value == "cmlm":
        lengths = carrier.receiver("lengths", _lengths(examples), _packed_lengths())
    hidden, gradient = [], []
    for capacity in abnet_config.buckets():
        spec = hidden_spec(capacity, width)
        hidden.append(
            carrier.sender(f"hidden[{capacity}]", spec, abnet_config.forward_codec())
        )
        gradient.append(
            carrier.receiver(
                f"gradient[{capacity}]", spec, abnet_config.backward_codec()
            )
        )
    spec = judged_spec(width)
    judged = carrier.sender("judged", spec, abnet_config.evaluation_codec(spec))
    return Near(buckets, lengths, hidden, gradient, judged)


def open_far(carrier: Carrier, examples: int, width: int) -> Far:
    """Opens the target cluster's ends; see `open_near`."""
    _check_codecs(examples, width)
    buckets = carrier.receiver("buckets", _buckets(examples), codecs.zstd())
    lengths = None
    if abnet_config.OBJECTIVE.value == "cmlm":
        lengths = carrier.sender("lengths", _lengths(examples), _packed_lengths())
    hidden, gradient = [], []
    for capacity in abnet_config.buckets():
        spec = hidden_spec(capacity, width)
        hidden.append(
            carrier.receiver(f"hidden[{capacity}]", spec, abnet_config.forward_codec())
        )
        gradient.append(
            carrier.sender(f"gradient[{capacity}]", spec, abnet_config.backward_codec())
        )
    spec = judged_spec(width)
    judged = carrier.receiver("judged", spec, abnet_config.evaluation_codec(spec))
    return Far(buckets, lengths, hidden, gradient, judged)


def _check_codecs(examples: int, width: int) -> None:
    """Tries them on the last examples: some choose by what they are given."""
    spec = hidden_spec(abnet_config.buckets()[0], width)
    arrays = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), spec)
    arrays["index"] += np.arange(examples - len(arrays["index"]), examples, dtype="i4")
    for flag in (abnet_config.FORWARD_CODEC, abnet_config.BACKWARD_CODEC):
        codec = codecs.from_string(flag.value)
        try:
            for option in codec_lib.fixed(codec):
                codec_lib.payload_spec(option, spec)
            if codec.choose is not None:
                codec.choose(arrays, codec.init(spec), shared_flags.STEPS.value)
        except ValueError as error:
            raise shared_flags.FlagError(
                f"--{flag.name}={flag.value}: {error}"
            ) from None


def codec_states(ends: Near | Far) -> list[Any]:
    """The codecs' states, to be saved with the run's."""
    return [channel.state for channel in (*ends.hidden, *ends.gradient)]


def set_codec_states(ends: Near | Far, states: list[Any]) -> None:
    """Gives the codecs the states of a checkpoint."""
    for channel, state in zip((*ends.hidden, *ends.gradient), states, strict=True):
        channel.state = state


def hidden_spec(capacity: int, width: int) -> dict[str, jax.ShapeDtypeStruct]:
    """What crosses of a micro-batch, and comes back as its gradient."""
    rows = shared_flags.BATCH_SIZE.value // abnet_config.MICRO_BATCHES.value
    return {
        "hidden": jax.ShapeDtypeStruct((rows, capacity, width), jnp.float32),
        "mask": jax.ShapeDtypeStruct((rows, capacity), jnp.bool_),
        "index": jax.ShapeDtypeStruct((rows,), jnp.int32),
    }


def judged_spec(width: int) -> dict[str, jax.ShapeDtypeStruct]:
    """What crosses of a batch in evaluation."""
    rows, capacity = shared_flags.BATCH_SIZE.value, abnet_config.buckets()[-1]
    spec = {
        "hidden": jax.ShapeDtypeStruct((rows, capacity, width), jnp.float32),
        "mask": jax.ShapeDtypeStruct((rows, capacity), jnp.bool_),
        "index": jax.ShapeDtypeStruct((rows,), jnp.int32),
    }
    if abnet_config.OBJECTIVE.value == "cmlm":
        # As integers no codec touches them: bits of float32.
        shape = (rows, capacity + 1)
        spec["length_logits"] = jax.ShapeDtypeStruct(shape, jnp.int32)
    return spec


def _buckets(examples: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((examples,), jnp.uint8)


def _lengths(examples: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((examples,), jnp.int32)


def _packed_lengths():
    return codecs.pack_ids(abnet_config.buckets()[-1] + 1)
