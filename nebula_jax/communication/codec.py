"""A codec is to a tensor on the wire what an optax transformation is to a gradient.

Three pure, jittable functions; hyper-parameters live in the closure, and state is
passed in and out on both ends. Only buffers travel: both ends `init` with the same
spec, and the receiver derives the payload's structure with `payload_spec`.

A payload has one shape, so that jit compiles once and its size is agreed in advance.
Where the contents or the step decide it, a `selector.Selector` chooses among codecs.
"""

import itertools
import math
import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from nebula_jax import errors, printable

Arrays = Any  # pytree of arrays
Payload = Any  # pytree of arrays; static facts ride in its structure
Spec = Any  # pytree of jax.ShapeDtypeStruct
State = Any  # pytree of arrays

UNNAMED = "unnamed"
NO_LEAF = "no such leaf"
MAX_ZSTD_LEVEL = 19  # above, a decoder needs more memory (`wire.zstd`)
WORTH_SAVING = 1024  # bytes: a codec that saves none of fewer is not worth a word


class CodecWarning(UserWarning):
    """A codec that does less on these arrays than its name promises."""


class Codec(NamedTuple):
    """The functions that turn arrays into what crosses the line, and back.

    init: spec -> state, on both ends.
    encode: (arrays, state) -> (payload, state).
    decode: (payload, state) -> (arrays, state).
    name: as in a flag, with all arguments: by it two clusters notice that their codecs
      differ. Of codecs without one only the payloads are compared.
    zstd: level at which a channel compresses the payload's bytes, on the host, 1 to 19;
      None: not. A codec inside another one has none: there it is the outer one's.
    """

    init: Callable[[Spec], State]
    encode: Callable[[Arrays, State], tuple[Payload, State]]
    decode: Callable[[Payload, State], tuple[Arrays, State]]
    name: str = UNNAMED
    zstd: int | None = None


def stateless(
    encode: Callable[[Arrays], Payload],
    decode: Callable[[Payload], Arrays],
    name: str = UNNAMED,
) -> Codec:
    """Makes a Codec from two functions that need no state."""
    return Codec(
        init=lambda spec: (),
        encode=lambda arrays, state: (encode(arrays), state),
        decode=lambda payload, state: (decode(payload), state),
        name=name,
    )


def identity() -> Codec:
    """Sends arrays as they are.

    Payload: the arrays. Wire: their bytes. NaN and Inf cross as they are.
    """
    return Codec(_no_state, _unchanged, _unchanged, "identity")


def zstd(level: int = 1) -> Codec:
    """Compresses the payload's bytes, on the host; the last of its chain.

    Payload: the arrays. Wire: at most their bytes, and some 8 an array; how many fewer
    depends on the values. NaN and Inf cross as they are.

    >>> zstd(3).zstd
    3

    Args:
      level: 1, the fastest, to 19.

    Raises:
      ValueError: if it is none.
    """
    check_integer("level", level, 1, MAX_ZSTD_LEVEL)
    return identity()._replace(zstd=level)


def _no_state(spec: Spec) -> State:
    return ()


def _unchanged(arrays: Arrays, state: State) -> tuple[Payload, State]:
    return arrays, state


def chain(*codecs: Codec) -> Codec:
    """Applies one codec after the other; decoding runs from right to left.

    The next codec sees the payload of the one before as its arrays. The chain's state
    is the tuple of the codecs' states. `codecs.chain` takes a Selector as its first
    codec, too, and bytes to be compressed after its last one.
    """
    if len(codecs) < 2:
        return codecs[0] if codecs else identity()

    def init(spec: Spec) -> State:
        states = []
        for codec in codecs:
            states.append(codec.init(spec))
            spec = jax.eval_shape(codec.encode, spec, states[-1])[0]
        return tuple(states)

    def encode(arrays: Arrays, states: State) -> tuple[Payload, State]:
        after = []
        for codec, state in zip(codecs, states, strict=True):
            arrays, state = codec.encode(arrays, state)
            after.append(state)
        return arrays, tuple(after)

    def decode(payload: Payload, states: State) -> tuple[Arrays, State]:
        after = []
        for codec, state in zip(codecs[::-1], states[::-1], strict=True):
            payload, state = codec.decode(payload, state)
            after.append(state)
        return payload, tuple(after[::-1])

    return Codec(init, encode, decode, "|".join(each.name for each in codecs))


def payload_spec(codec: Codec, spec: Spec) -> Payload:
    """Returns the payload's structure, shapes and dtypes for arrays like `spec`."""
    state = jax.eval_shape(lambda: codec.init(spec))
    return jax.eval_shape(codec.encode, spec, state)[0]


def nbytes(spec: Spec) -> int:
    """Returns the bytes of all leaves together."""
    return sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(spec)
    )


def ratio(codec: Codec, spec: Spec) -> float:
    """Returns a payload's bytes over those before encoding, as in the paper's Table 5.

    What zstd saves depends on the contents and is not counted.
    """
    return nbytes(payload_spec(codec, spec)) / nbytes(spec)


def fitted(what: str, codec: Codec, spec: Spec) -> Payload:
    """Returns what `payload_spec` does, of a codec that gives back what it is given.

    Nothing is computed. `what` names the arrays in errors. Raises errors.SettingsError
    at arrays that are none, or if what is decoded differs from the spec, or a state
    from the one before it.
    """
    check_arrays(what, spec)
    state = jax.eval_shape(lambda: codec.init(spec))
    payload, sender = jax.eval_shape(codec.encode, spec, state)
    arrays, receiver = jax.eval_shape(codec.decode, payload, state)
    if found := difference(spec, arrays):
        raise errors.SettingsError(
            f"{what}: codec {codec.name} was given {found[0]} and decodes {found[1]};"
            " decode must return the shapes and dtypes that encode was given"
        )
    for after in (sender, receiver):
        if found := difference(state, after):
            raise errors.SettingsError(
                f"{what}: the state of codec {codec.name} begins with {found[0]} and"
                f" goes on with {found[1]}; it must keep its shapes and dtypes"
            )
    return payload


def warn_unless_smaller(what: str, name: str, spec: Spec, payloads: Payload) -> None:
    """Warns, once, of a codec whose smallest payload saves nothing."""
    before, after = nbytes(spec), min(map(nbytes, payloads))
    if after >= before >= WORTH_SAVING:
        warnings.warn(
            f"{what}: codec {name} saves nothing: it makes {after:,} bytes of"
            f" {before:,}",
            CodecWarning,
            stacklevel=2,
        )


def check_integer(name: str, value: Any, least: int, most: int | None = None) -> None:
    """Checks an argument of a codec; raises ValueError unless it is in its range."""
    if type(value) is not int or value < least or (most is not None and value > most):
        limits = f"{least} to {most}" if most else f"an integer of at least {least}"
        raise ValueError(f"{name} must be {limits}, not {value!r}")


def check_share(name: str, value: Any) -> None:
    """Checks an argument of a codec; raises ValueError unless it is in (0, 1]."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= 1:
        raise ValueError(f"{name} must be above 0 and at most 1, not {value!r}")


def check_arrays(what: str, tree: Any) -> None:
    """Checks that every leaf of a tree is an array, or the spec of one.

    Raises errors.SettingsError with the leaf's path and type, and what to do.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
            continue
        if isinstance(leaf, bool | int | float | complex):
            remedy = f"write jnp.asarray({leaf})"
        else:
            remedy = (
                "leave out what is no array, as eqx.partition(model, eqx.is_array) and"
                " nnx.split(model) do"
            )
        raise errors.SettingsError(
            f"{what}{jax.tree_util.keystr(path)} is no array but"
            f" {printable.line(repr(leaf), 60)}, of type {type(leaf).__name__}:"
            f" {remedy}"
        )


def difference(one: Any, two: Any) -> tuple[str, str] | None:
    """Returns the first difference of two trees of arrays, as texts; None without."""
    for here, there in itertools.zip_longest(leaf_texts(one), leaf_texts(two)):
        if here != there:
            return here or NO_LEAF, there or NO_LEAF
    if (trees := (tree_text(one), tree_text(two)))[0] != trees[1]:
        return f"the tree {printable.line(trees[0])}", printable.line(trees[1])
    return None


def leaf_texts(tree: Any) -> list[str]:
    """Returns `['hidden'] float32[4, 16]` and so on."""
    return [
        f"{jax.tree_util.keystr(path)} {_leaf_text(leaf)}".strip()
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


def _leaf_text(leaf: Any) -> str:
    if not hasattr(leaf, "dtype"):
        return type(leaf).__name__
    return f"{leaf.dtype}[{', '.join(map(str, leaf.shape))}]"


def tree_text(tree: Any) -> str:
    """Returns a tree's structure, without addresses, which no two processes share."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(jax.tree.structure(tree)))
