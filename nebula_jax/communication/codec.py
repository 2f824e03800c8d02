"""A codec is to a tensor on the wire what an optax transformation is to a gradient.

Three pure, jittable functions; hyper-parameters live in the closure, and state is
passed in and out on both ends. Only buffers travel: both ends `init` with the same
spec, and the receiver derives the payload's structure with `payload_spec`.

Nodes of a payload that can hold what no encoder makes, such as an index out of range,
check themselves on arrival: they have a method `check_values` (`arrivals.Checked`).

A payload has one shape, so that jit compiles once and its size is agreed in advance.
Where the contents decide the shape, or the step, a `selector.Selector` chooses among
codecs of one shape each.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from nebula_jax.communication.wire import zstd as zstd_lib

Arrays = Any  # pytree of arrays
Payload = Any  # pytree of arrays; static facts ride in its structure
Spec = Any  # pytree of jax.ShapeDtypeStruct
State = Any  # pytree of arrays

UNNAMED = "unnamed"


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

    >>> chain(identity(), zstd(3)).zstd
    3

    Args:
      level: 1, the fastest, to 19.

    Raises:
      ValueError: if it is none.
    """
    return identity()._replace(zstd=zstd_lib.check_level(level))


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
