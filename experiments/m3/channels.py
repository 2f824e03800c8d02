"""Everything that crosses in an M3 run beside step tokens, on two channels.

    tokens      a step      generator -> discriminator   its batch, corrupted
    held_out    evaluation  generator -> discriminator   its held-out text, corrupted

Each generator has both on its own link; ids are packed at ceil(log2 V) bits.

B batch, L length, M mask capacity, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from nebula_jax.communication import channels, codecs
from nebula_jax.training import m3

NAMES = ("tokens", "held_out")


class Ends(NamedTuple):
    """One cluster's ends of both channels: Senders or Receivers."""

    tokens: Any
    held_out: Any


def senders(
    carrier: channels.Carrier, config: m3.Config, batch_size: int, vocab_size: int
) -> Ends:
    """Opens a generator's ends, to the discriminator."""
    spec, pack = m3.tokens_spec(config, batch_size), codecs.pack_ids(vocab_size)
    return Ends(*(carrier.sender(name, spec, pack) for name in NAMES))


def receivers(
    carrier: channels.Carrier,
    config: m3.Config,
    batch_size: int,
    vocab_size: int,
    sharding: Any = None,
) -> Ends:
    """Opens the discriminator's ends, to one generator; `sharding` of what comes."""
    spec, pack = m3.tokens_spec(config, batch_size), codecs.pack_ids(vocab_size)
    more = {"sharding": sharding, "check": check_tokens}
    return Ends(*(carrier.receiver(name, spec, pack, **more) for name in NAMES))


def received(ends: Sequence[Ends], step: int, fan_out: int) -> list[m3.Tokens]:
    """Receives all micro-batches of a step, generator by generator."""
    return [each for end in ends for each in end.tokens.recv_all(step, fan_out)]


def check_tokens(tokens: m3.Tokens) -> None:
    """Raises ValueError if a row has more masked positions than slots for originals."""
    # The ids are checked by their codec.
    capacity = tokens.originals.shape[-1]
    most = int(np.asarray(tokens.masked).sum(axis=-1).max(initial=0))
    if most > capacity:
        raise ValueError(f"masked: {most} positions of a row; at most {capacity}")
