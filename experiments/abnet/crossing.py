"""The codecs of an ABNet run in both directions, and the columns that they send.

With a bottleneck of several ranks each step sends another number of columns, a pure
function of seed and step: so one model learns to work with each of them, and both sides
find the same number without a word.

With `auto` codecs the rungs of a ladder are used that `control` names before each step.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence

from experiments.abnet import config
from nebula_jax.communication import codecs, selector
from nebula_jax.parallel import codec_control

AUTO = "auto"
LADDER = (
    "pack_tokens|bf16",
    "pack_tokens|int8(64)",
    "pack_tokens|hadamard|int4(64)|bf16",
)
"""Codecs for `auto`, the gentlest first; then come fewer columns by the last one.

bf16 and not fp16: a gradient is divided by the tokens of a batch, and nothing scales it
up again, so that float16 would round it, or the scales of int4, towards zero."""


@dataclasses.dataclass
class InUse:
    """The rungs that `auto` codecs have now."""

    rungs: codec_control.Rungs = dataclasses.field(default_factory=codec_control.Rungs)


def rank_of_step(agreed: config.Agreed, step: int) -> int:
    """Returns which of --bottleneck a step uses, its place in the list.

    Half of the steps use the first, which has most to learn; the others share the rest.

    Args:
      agreed: of the run, with two ranks or more.
      step: counted from 1.
    """
    text = f"rank of step {step} with seed {agreed.seed}"
    drawn = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    others = len(agreed.bottleneck) - 1
    return max(0, drawn % (2 * others) - others + 1)


def is_auto(agreed: config.Agreed) -> bool:
    """Returns True if the run chooses its codecs by itself."""
    return agreed.forward_codec == agreed.backward_codec == AUTO


def ladder(agreed: config.Agreed) -> list[selector.CodecOrSelector]:
    """Returns the codecs that `auto` chooses from, the gentlest first."""
    return [codecs.from_string(text).codec for text in ladder_texts(agreed.bottleneck)]


def ladder_texts(ranks: Sequence[int]) -> list[str]:
    """Returns the codecs of the ladder as flags have them.

    Args:
      ranks: of the bottleneck.
    """
    return [*LADDER, *(f"columns({LADDER[-1]}, {rank})" for rank in ranks[1:])]


def forward(agreed: config.Agreed, in_use: InUse | None = None) -> codecs.Compression:
    """Returns how hidden states are made smaller in training.

    Args:
      agreed: of the run.
      in_use: the rungs of `auto` codecs, for the end that sends.

    Raises:
      codecs.CodecError: at a codec that cannot be read.
    """
    if is_auto(agreed):
        rungs = in_use or InUse()
        return _of_ladder(agreed, lambda step: rungs.rungs.forward)
    return _of_ranks(agreed, agreed.forward_codec)


def backward(agreed: config.Agreed, in_use: InUse | None = None) -> codecs.Compression:
    """Returns how gradients are made smaller; see `forward`."""
    if is_auto(agreed):
        rungs = in_use or InUse()
        return _of_ladder(agreed, lambda step: rungs.rungs.backward)
    return _of_ranks(agreed, agreed.backward_codec)


def texts(agreed: config.Agreed) -> tuple[str, str]:
    """Returns the codecs that the run begins with, in both directions, as flags."""
    if is_auto(agreed):
        return LADDER[0], LADDER[0]
    return agreed.forward_codec, agreed.backward_codec


def evaluation(agreed: config.Agreed) -> codecs.Compression:
    """Returns how hidden states are made smaller in evaluation, with all columns.

    As in training; with `auto` by the gentlest of its codecs.
    """
    return codecs.from_string(texts(agreed)[0])


def _of_ladder(
    agreed: config.Agreed, which: Callable[[int], int]
) -> codecs.Compression:
    return codecs.Compression(selector.by_step(ladder(agreed), which))


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
