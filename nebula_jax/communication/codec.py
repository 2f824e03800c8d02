"""A codec is to a tensor on the wire what an optax transformation is to a gradient.

Three pure, jittable functions; hyper-parameters live in the closure, and state is
passed in and out on both ends. Only buffers travel: both ends `init` with the same
spec, and the receiver derives the payload's structure with `payload_spec`.

A payload has one shape, so that jit compiles once and the receiver knows what is due.
Where what is sent decides the shape (how many tokens are no padding, whether an example
was seen before), or when (has compression begun?), a codec offers a few `options`,
codecs of one shape each that share their state, and `choose` names one of them on the
host; its number crosses the line.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from flax import struct

Arrays = Any  # pytree of arrays
Payload = Any  # pytree of arrays; static facts ride in its structure
Spec = Any  # pytree of jax.ShapeDtypeStruct
State = Any  # pytree of arrays


class Codec(NamedTuple):
    """How arrays become what crosses the line, and back.

    init: spec -> state, on both ends.
    encode: (arrays, state) -> (payload, state). With options, it chooses, so it cannot
      be jitted as a whole (each option can), and takes the step as a third argument; if
      that is left out it is the first one, and nothing that begins later ever does.
    decode: (payload, state) -> (arrays, state).
    options: codecs of a fixed payload shape that share `init`; empty where there is
      one shape only, which is most codecs.
    choose: (arrays, state, step) -> number of the option to use. On the host. step is
      the optimisation step, an int counted from 1.
    zstd: level of the lossless coding of the payload's bytes on the host, or None.
    final: whether nothing but zstd may follow in a chain, because the sender keeps what
      it takes the receiver to have received.
    """

    init: Callable[[Spec], State]
    encode: Callable[[Arrays, State], tuple[Payload, State]]
    decode: Callable[[Payload, State], tuple[Arrays, State]]
    options: tuple["Codec", ...] = ()
    choose: Callable[[Arrays, State, int], int] | None = None
    zstd: int | None = None
    final: bool = False


@struct.dataclass
class Chosen:
    """The payload of a codec with options, together with the number of the option."""

    payload: Payload
    option: int = struct.field(pytree_node=False)


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
    return Codec(_nothing, _same, _same)


def _nothing(spec: Spec) -> State:
    return ()


def _same(arrays: Arrays, state: State) -> tuple[Payload, State]:
    return arrays, state


def choice(
    options: Sequence[Codec],
    choose: Callable[[Arrays, State, int], int],
    zstd: int | None = None,
) -> Codec:
    """A Codec of several shapes, from codecs of one shape that share their state.

    Args:
      options: what to choose from; the first one's `init` serves all.
      choose: names one by its number, from concrete arrays; see `Codec`.
      zstd: level, see `Codec`.
    """

    def encode(arrays, state, step=1):
        option = choose(arrays, state, step)
        payload, state = options[option].encode(arrays, state)
        return Chosen(payload, option), state

    def decode(payload, state):
        return options[payload.option].decode(payload.payload, state)

    return Codec(options[0].init, encode, decode, tuple(options), choose, zstd)


def fixed(codec: Codec) -> tuple[Codec, ...]:
    """The codecs of one shape each that `codec` consists of: its options, or itself."""
    return codec.options or (codec,)


def like(codec: Codec, wrap: Callable[[Codec], Codec], inner: Callable[[State], State]):
    """Wraps every option of `codec`, keeping how it chooses.

    Args:
      codec: with or without options.
      wrap: a codec of one shape -> the wrapped codec of one shape.
      inner: state of a wrapped codec -> state of the codec inside.
    """
    options = tuple(wrap(option) for option in fixed(codec))
    if codec.choose is None:
        return options[0]._replace(zstd=codec.zstd, final=codec.final)

    def choose(arrays, state, step):
        return codec.choose(arrays, inner(state), step)

    return choice(options, choose, codec.zstd)._replace(final=codec.final)


def chain(*codecs: Codec) -> Codec:
    """One codec after the other; decoding runs from right to left.

    `chain(svd(0.6), fp16())` is eq. 5. The next codec sees the payload of the one
    before as its arrays.

    Raises:
      ValueError: if one that chooses among shapes is not the first, one that works on
        bytes (zstd) is not the last, or something else than that follows one that is
        final.
    """
    if not codecs:
        return identity()
    chained = codecs[0]
    for codec in codecs[1:]:
        if codec.options:
            raise ValueError(
                "a codec that chooses a shape by what is sent or when (pack_tokens,"
                " delta, from_step) must be the first of its chain"
            )
        if chained.zstd is not None:
            raise ValueError("zstd works on bytes: it must be the last of its chain")
        if chained.final and codec.encode is not _same:
            raise ValueError(
                "delta must know what the receiver gets: only zstd may follow it;"
                " other codecs go inside, as in delta(svd(0.6)|fp16, 20000)"
            )
        chained = _pair(chained, codec)
    return chained


def _pair(first: Codec, second: Codec) -> Codec:
    options = fixed(first)

    def init(spec):
        # The second codec may see another shape from each option of the first.
        state = first.init(spec)
        payloads = [jax.eval_shape(each.encode, spec, state)[0] for each in options]
        return state, tuple(second.init(payload) for payload in payloads)

    def pair(number: int) -> Codec:
        def encode(arrays, states):
            state, others = states
            payload, state = options[number].encode(arrays, state)
            payload, other = second.encode(payload, others[number])
            return payload, (state, _replace(others, number, other))

        def decode(payload, states):
            state, others = states
            payload, other = second.decode(payload, others[number])
            arrays, state = options[number].decode(payload, state)
            return arrays, (state, _replace(others, number, other))

        return Codec(init, encode, decode, zstd=second.zstd)

    pairs = [pair(number) for number in range(len(options))]
    if first.choose is None:
        return pairs[0]

    def choose(arrays, states, step):
        return first.choose(arrays, states[0], step)

    return choice(pairs, choose, second.zstd)


def _replace(states: tuple, number: int, state: State) -> tuple:
    return (*states[:number], state, *states[number + 1 :])


def payload_spec(codec: Codec, spec: Spec) -> Payload:
    """The payload's structure, shapes and dtypes for arrays like `spec`.

    For a codec of one shape: of one with options, ask each option.
    """
    state = jax.eval_shape(lambda: codec.init(spec))
    return jax.eval_shape(codec.encode, spec, state)[0]


def nbytes(spec: Spec) -> int:
    """Bytes of all leaves together."""
    return sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(spec)
    )


def ratio(codec: Codec, spec: Spec) -> float:
    """Bytes on the wire over bytes before encoding, as in the paper's Table 5.

    Of a codec with options, that of the largest payload; what zstd saves depends on
    the contents and is not counted.
    """
    sizes = [nbytes(payload_spec(option, spec)) for option in fixed(codec)]
    return max(sizes) / nbytes(spec)
