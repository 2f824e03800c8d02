"""Codecs of which the sender chooses one, tensor by tensor, on the host.

Where the contents decide a payload's shape (how many tokens are no padding), or the
step does (has compression begun?), a Selector holds a codec for each shape, all with
one spec and one state, and a function that names one by its number. That crosses in the
frame's header, as one byte: a channel takes at most `frames.MAX_OPTIONS` codecs.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import struct

from nebula_jax.communication import codec as codec_lib


@struct.dataclass
class Selected:
    """A payload, and the number of the codec that encoded it."""

    payload: codec_lib.Payload
    option: int = struct.field(pytree_node=False, default=0)


class Selector(NamedTuple):
    """A choice among codecs, of one payload shape each, that share one state.

    choose: (arrays, state, step) -> number of the codec to use, on the host. step is
      the optimization step, an int counted from 1.
    """

    codecs: tuple[codec_lib.Codec, ...]
    choose: Callable[[codec_lib.Arrays, codec_lib.State, int], int]
    name: str = codec_lib.UNNAMED
    zstd: int | None = None

    def init(self, spec: codec_lib.Spec) -> codec_lib.State:
        """Makes the state that all codecs share."""
        return self.codecs[0].init(spec)

    def encode(
        self, arrays: codec_lib.Arrays, state: codec_lib.State, step: int = 1
    ) -> tuple[Selected, codec_lib.State]:
        """Chooses and encodes; on the host, hence not to be jitted.

        `step` defaults to 1, so codecs with a start step stay inactive.
        """
        option = self.choose(arrays, state, step)
        payload, state = self.codecs[option].encode(arrays, state)
        return Selected(payload, option), state

    def decode(
        self, selected: Selected, state: codec_lib.State
    ) -> tuple[codec_lib.Arrays, codec_lib.State]:
        """Decodes with the codec that encoded."""
        return self.codecs[selected.option].decode(selected.payload, state)


CodecOrSelector = codec_lib.Codec | Selector


def as_selector(codec: CodecOrSelector) -> Selector:
    """Returns `codec` if it is a Selector, otherwise a Selector of it alone."""
    if isinstance(codec, Selector):
        return codec
    return Selector(
        codecs=(codec,),
        choose=lambda arrays, state, step: 0,
        name=codec.name,
        zstd=codec.zstd,
    )


def compiled(codec: CodecOrSelector, sharding: Any = None) -> Selector:
    """Returns a Selector whose codecs are programs of their own, and use up states.

    `sharding` is of what is decoded; None leaves it to the compiler.
    """
    made = as_selector(codec)
    where = (sharding, None)
    return made._replace(
        codecs=tuple(
            each._replace(
                encode=jax.jit(each.encode, donate_argnums=1),
                decode=jax.jit(each.decode, donate_argnums=1, out_shardings=where),
            )
            for each in made.codecs
        )
    )


def fitted(
    what: str, codec: CodecOrSelector, spec: codec_lib.Spec
) -> tuple[codec_lib.Payload, ...]:
    """Returns the payload's spec of each of its codecs; see `codec.fitted`."""
    return tuple(
        codec_lib.fitted(what, each, spec) for each in as_selector(codec).codecs
    )


def chain(*codecs: CodecOrSelector) -> CodecOrSelector:
    """Applies one codec after the other; decoding runs from right to left.

    `chain(svd(0.6), fp16())` is eq. 5. The next codec sees the payload of the one
    before as its arrays. With a Selector at its head the chain is a Selector, in which
    the later codecs have a state for each payload shape of the first.

    Returns:
      A Codec if all of them are; otherwise a Selector.

    Raises:
      ValueError: if a Selector is not the first, or if a codec follows zstd.
    """
    if any(each.zstd is not None for each in codecs[:-1]):
        raise ValueError("zstd works on bytes: it must be the last of its chain")
    zstd = codecs[-1].zstd if codecs else None
    identity = codec_lib.identity()
    plain = [each._replace(zstd=None) for each in codecs]
    first, *rest = [each for each in plain if each != identity] or [identity]
    later = [each for each in rest if not isinstance(each, Selector)]
    if len(later) < len(rest):
        raise ValueError(
            "a codec that chooses a shape by the contents or the step (pack_tokens,"
            " from_step) must be the first of its chain"
        )
    if isinstance(first, Selector):
        made = _with_tail(first, codec_lib.chain(*later)) if later else first
        return made._replace(zstd=zstd)
    return codec_lib.chain(first, *later)._replace(zstd=zstd)


def staged_encoder(codec: CodecOrSelector) -> tuple[Callable, Callable]:
    """Splits encoding in two: inside another program, and after it, on the host.

    Returns (arrays, state) -> (arrays or payload, state), to be jitted with the
    program; and (that, state, step) -> (Selected, state).
    """
    if isinstance(codec, codec_lib.Codec):
        return codec.encode, lambda payload, state, step: (Selected(payload), state)
    return codec_lib.identity().encode, compiled(codec).encode


def staged_decoder(codec: CodecOrSelector) -> tuple[Callable, Callable]:
    """Splits decoding in two: before another program, on the host, and inside it.

    Returns (Selected, state) -> (payload or arrays, state); and (that, state) ->
    (arrays, state), to be jitted with the program.
    """
    if isinstance(codec, codec_lib.Codec):
        return lambda selected, state: (selected.payload, state), codec.decode
    return compiled(codec).decode, codec_lib.identity().decode


def _with_tail(head: Selector, tail: codec_lib.Codec) -> Selector:
    def init(spec: codec_lib.Spec) -> codec_lib.State:
        state = head.init(spec)
        # The tail sees another shape from each codec of the head.
        payloads = [jax.eval_shape(each.encode, spec, state)[0] for each in head.codecs]
        return state, tuple(map(tail.init, payloads))

    return head._replace(
        codecs=tuple(
            codec_lib.chain(each, _with_state(number, tail))._replace(init=init)
            for number, each in enumerate(head.codecs)
        ),
        choose=lambda arrays, states, step: head.choose(arrays, states[0], step),
        name=f"{head.name}|{tail.name}",
    )


def _with_state(number: int, codec: codec_lib.Codec) -> codec_lib.Codec:
    """Makes a codec whose state is one of a tuple of states; the others stay."""

    def put(states: tuple, state: codec_lib.State) -> tuple:
        return (*states[:number], state, *states[number + 1 :])

    def encode(
        arrays: codec_lib.Arrays, states: tuple
    ) -> tuple[codec_lib.Payload, tuple]:
        payload, state = codec.encode(arrays, states[number])
        return payload, put(states, state)

    def decode(
        payload: codec_lib.Payload, states: tuple
    ) -> tuple[codec_lib.Arrays, tuple]:
        arrays, state = codec.decode(payload, states[number])
        return arrays, put(states, state)

    return codec._replace(encode=encode, decode=decode)
