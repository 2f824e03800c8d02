"""The codecs of an ABNet run in both directions, and the columns that they send.

With a bottleneck of several ranks each step sends another number of columns, a pure
function of seed and step: so one model learns to work with each of them, and both sides
find the same number without a word.
"""

import functools
import hashlib

from experiments.abnet import config
from nebula_jax.communication import codecs, selector


def rank_of_step(agreed: config.Agreed, step: int) -> int:
    """Returns which of --bottleneck a step uses, its place in the list.

    Args:
      agreed: of the run.
      step: counted from 1.
    """
    text = f"rank of step {step} with seed {agreed.seed}"
    drawn = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    return drawn % len(agreed.bottleneck)


def forward(agreed: config.Agreed) -> codecs.Compression:
    """Returns how hidden states are made smaller in training.

    Raises:
      codecs.CodecError: at a codec that cannot be read.
    """
    return _of_ranks(agreed, agreed.forward_codec)


def backward(agreed: config.Agreed) -> codecs.Compression:
    """Returns how gradients are made smaller; see `forward`."""
    return _of_ranks(agreed, agreed.backward_codec)


def _of_ranks(agreed: config.Agreed, text: str) -> codecs.Compression:
    compression = codecs.from_string(text)
    if len(agreed.bottleneck) < 2:
        return compression
    of_each = [
        of_rank(agreed, compression, place).codec
        for place in range(len(agreed.bottleneck))
    ]
    chosen = selector.by_step(of_each, functools.partial(rank_of_step, agreed))
    return compression._replace(codec=chosen)


def of_rank(
    agreed: config.Agreed, compression: codecs.Compression, place: int
) -> codecs.Compression:
    """Returns a compression that sends the columns of one rank alone.

    Args:
      agreed: of the run.
      compression: of what is sent.
      place: of the rank, in --bottleneck.
    """
    if len(agreed.bottleneck) < 2:
        return compression
    narrow = codecs.columns(compression.codec, agreed.bottleneck[place])
    return compression._replace(codec=narrow)
