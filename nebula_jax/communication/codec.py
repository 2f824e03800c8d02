"""A codec is to a tensor on the wire what an optax transformation is to a gradient.

Three pure, jittable functions; hyper-parameters live in the closure, and state is
passed in and out on both ends. Only buffers travel: both ends `init` with the same
spec, and the receiver derives the payload's structure with `payload_spec`.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

Arrays = Any  # pytree of arrays
Payload = Any  # pytree of arrays; static facts ride in its structure
Spec = Any  # pytree of jax.ShapeDtypeStruct
State = Any


class Codec(NamedTuple):
    """How arrays become what crosses the line, and back.

    init: spec -> state, on both ends.
    encode: (arrays, state) -> (payload, state).
    decode: (payload, state) -> (arrays, state).
    """

    init: Callable[[Spec], State]
    encode: Callable[[Arrays, State], tuple[Payload, State]]
    decode: Callable[[Payload, State], tuple[Arrays, State]]


def stateless(
    encode: Callable[[Arrays], Payload], decode: Callable[[Payload], Arrays]
) -> Codec:
    """A Codec from two functions that need no state."""
    return Codec(
        init=lambda spec: (),
        encode=lambda arrays, state: (encode(arrays), state),
        decode=lambda payload, state: (decode(payload), state),
    )


def identity() -> Codec:
    """Sends arrays as they are."""
    return stateless(lambda arrays: arrays, lambda payload: payload)


def payload_spec(codec: Codec, spec: Spec) -> Payload:
    """The payload's structure, shapes and dtypes for arrays like `spec`."""
    return jax.eval_shape(codec.encode, spec, codec.init(spec))[0]


def nbytes(spec: Spec) -> int:
    """Bytes of all leaves together."""
    return sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(spec)
    )


def ratio(codec: Codec, spec: Spec) -> float:
    """Bytes on the wire over bytes before encoding, as in the paper's Table 5."""
    return nbytes(payload_spec(codec, spec)) / nbytes(spec)
