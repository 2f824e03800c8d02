"""Everything that crosses in an ABNet run, as one table of channels.

    once        buckets     source -> target  [N] uint8, length bucket of a source row
                bottleneck  source -> target  how the target begins to read it, if any
                lengths     target -> source  [N] int32, tokens of a target row (cmlm)
    a batch     hidden      source -> target  H^E, its mask, the examples' numbers; one
                gradient    target -> source  channel each for every length bucket
    evaluation  evaluation  source -> target  H^E of dev, test and held-out sentences,
                                              length logits (cmlm)
    translation sentences   source -> target  as evaluation: see `two_sites`
                words       target -> source  what they are in the target's language

Nothing else crosses; the byte ledger counts every frame.

N examples, B rows of a micro-batch (in evaluation, of a batch), L length, D width.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.abnet import config, models
from nebula_jax import errors
from nebula_jax.communication import arrivals, channels, codecs, selector
from nebula_jax.communication import codec as codec_lib
from nebula_jax.models import bottleneck
from nebula_jax.parallel import mesh as mesh_lib

Role = Literal["source", "target"]
PIECE_BYTES = 256  # of a piece in JSON: sentencepiece's have at most 16 characters


class Channel(NamedTuple):
    """One row of the table."""

    name: str  # unique
    sender: Role  # the other one receives
    spec: codec_lib.Spec
    codec: selector.CodecOrSelector
    check: channels.Check | None = None  # on arrival, beside the codec's own


class Ends(NamedTuple):
    """One role's ends of all channels: Senders and Receivers."""

    buckets: Any
    bottleneck: Any  # None if there is none
    lengths: Any  # None unless the objective is cmlm
    hidden: list[Any]  # one for each length bucket
    gradient: list[Any]  # one for each length bucket
    evaluation: Any


def table(agreed: config.Agreed, examples: int, width: int) -> list[Channel]:
    """Lists the channels in the order in which both open them; `width` is PLM-S's."""
    sent = agreed.sent_width(width)
    index = jax.ShapeDtypeStruct((examples,), jnp.uint8)
    lengths = jax.ShapeDtypeStruct((examples,), jnp.int32)
    spec = evaluation_spec(agreed, sent)
    of_bucket = _in_range(0, len(agreed.length_buckets))
    level = codecs.zstd(1)
    rows = [Channel("buckets", "source", index, level, of_bucket)]
    if agreed.bottleneck:
        start = jax.eval_shape(lambda: bottleneck.blank(width, agreed.bottleneck))
        plain = codecs.identity()
        rows += [Channel("bottleneck", "source", start, plain, _check_start)]
    if agreed.objective == "cmlm":
        past = agreed.length_buckets[-1] + 1
        pack = codecs.pack_ids(past)
        rows += [Channel("lengths", "target", lengths, pack, _in_range(1, past))]
    for length in agreed.length_buckets:
        hidden = hidden_spec(agreed, length, sent)
        rows += [
            Channel(f"hidden[{length}]", "source", hidden, agreed.codecs.forward),
            Channel(f"gradient[{length}]", "target", hidden, agreed.codecs.backward),
        ]
    kept = evaluation_codec(agreed, spec)
    return [*rows, Channel("evaluation", "source", spec, kept, _check_evaluation)]


def _in_range(low: int, high: int) -> Callable[[codec_lib.Arrays], None]:
    return functools.partial(arrivals.check_range, low=low, high=high)


def _check_start(start: codec_lib.Arrays) -> None:
    for part in start:
        arrivals.check_finite(part)


def _check_evaluation(arrays: codec_lib.Arrays) -> None:
    """Raises ValueError at hidden states or length logits that are not finite."""
    arrivals.check_finite(arrays["hidden"])
    if "length_logits" in arrays:  # that of a length that cannot be is -Inf
        logits = np.asarray(arrays["length_logits"]).view(np.float32)
        arrivals.check_finite(logits[logits != -np.inf])


def open_ends(
    agreed: config.Agreed,
    carrier: channels.Carrier,
    role: Role,
    examples: int,
    width: int,
) -> Ends:
    """Opens one role's ends of all channels.

    Raises errors.SettingsError if a codec cannot encode what crosses, or packs ints.
    """
    _check_codecs(agreed, examples, width)
    ends = _opened(table(agreed, examples, width), carrier, role)

    def of_buckets(name: str) -> list[Any]:
        return [ends[f"{name}[{length}]"] for length in agreed.length_buckets]

    return Ends(
        buckets=ends["buckets"],
        bottleneck=ends.get("bottleneck"),
        lengths=ends.get("lengths"),
        hidden=of_buckets("hidden"),
        gradient=of_buckets("gradient"),
        evaluation=ends["evaluation"],
    )


def _opened(
    rows: list[Channel], carrier: channels.Carrier, role: Role
) -> dict[str, Any]:
    """Opens one role's ends of channels; returns them by their names."""
    ends: dict[str, Any] = {}
    for name, sender, spec, codec, check in rows:
        if sender == role:
            ends[name] = carrier.sender(name, spec, codec)
        else:
            ends[name] = carrier.receiver(name, spec, codec, check=check)
    return ends


def translation_ends(
    agreed: config.Agreed, carrier: channels.Carrier, role: Role, rows: int, width: int
) -> dict[str, Any]:
    """Opens a role's ends of `sentences` and `words`; B `rows` cross together."""
    spec = evaluation_spec(agreed, agreed.sent_width(width), rows)
    room = rows * agreed.length_buckets[-1] * PIECE_BYTES
    words = jax.ShapeDtypeStruct((room,), jnp.uint8)
    codec = evaluation_codec(agreed, spec)
    table_rows = [
        Channel("sentences", "source", spec, codec, _check_evaluation),
        Channel("words", "target", words, codecs.zstd(1)),
    ]
    return _opened(table_rows, carrier, role)


def fresh(agreed: config.Agreed, half: models.Half, width: int) -> mesh_lib.ShardedInit:
    """Returns what a side saves, at step 0: `state`, and `codecs` for each bucket."""
    codecs_of = [
        half.program.init_states(hidden_spec(agreed, length, agreed.sent_width(width)))
        for length in agreed.length_buckets
    ]
    return mesh_lib.sharded_init_with_codecs(half.fresh, half.mesh, codecs_of)


def _check_codecs(agreed: config.Agreed, examples: int, width: int) -> None:
    """Tries the codecs on the last examples: some choose by the contents."""
    width = agreed.sent_width(width)
    spec = hidden_spec(agreed, agreed.length_buckets[0], width)
    arrays = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), spec)
    arrays["index"] += np.arange(examples - len(arrays["index"]), examples, dtype="i4")
    for name, each in (
        ("forward_codec", agreed.codecs.forward),
        ("backward_codec", agreed.codecs.backward),
    ):
        made = selector.as_selector(each)
        try:
            if "pack_ids(" in made.name:  # a name has all parts of a codec
                raise ValueError(
                    "pack_ids would cut the numbers of examples, and the bits of length"
                    " logits"
                )
            for codec in made.codecs:
                codec_lib.payload_spec(codec, spec)
            made.choose(arrays, made.init(spec), agreed.steps)
        except ValueError as error:
            text = getattr(agreed, name)
            raise errors.SettingsError(f"--{name}={text}: {error}") from None


def hidden_spec(
    agreed: config.Agreed, length: int, width: int
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the spec of a micro-batch's H^E, and of its gradient."""
    return _hidden_spec(agreed.batch_size // agreed.micro_batches, length, width)


def evaluation_spec(
    agreed: config.Agreed, width: int, rows: int = 0
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the spec of a batch in evaluation; L is the longest bucket's.

    B is `rows`, or with 0 that of training; `width` is that of what crosses.
    """
    rows, length = rows or agreed.batch_size, agreed.length_buckets[-1]
    spec = _hidden_spec(rows, length, width)
    if agreed.objective == "cmlm":
        # Bits of float32, as integers: a codec that packs these is refused.
        shape = (rows, length + 1)
        spec["length_logits"] = jax.ShapeDtypeStruct(shape, jnp.int32)
    return spec


def _hidden_spec(rows: int, length: int, width: int) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        "hidden": jax.ShapeDtypeStruct((rows, length, width), jnp.float32),
        "mask": jax.ShapeDtypeStruct((rows, length), jnp.bool_),
        "index": jax.ShapeDtypeStruct((rows,), jnp.int32),
    }


def evaluation_codec(
    agreed: config.Agreed, spec: codec_lib.Spec
) -> selector.CodecOrSelector:
    """Returns the codec of hidden states in evaluation: the forward codec.

    One with a state, such as a memory of what was sent, has none that fits sentences
    that are not trained on: then plain fp16, packed.
    """
    codec = agreed.codecs.forward
    if jax.tree.leaves(jax.eval_shape(lambda: codec.init(spec))):
        return codecs.from_string("pack_tokens|fp16")
    return codec
