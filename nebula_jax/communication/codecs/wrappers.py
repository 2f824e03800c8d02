"""Codecs around codecs: error feedback, and a late start."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication import selector
from nebula_jax.communication.codecs import leaves


@struct.dataclass
class Feedback:
    """The state of `error_feedback`."""

    residual: tuple[jax.Array, ...]  # float leaves, float32: what was not sent yet
    encode: Any  # the inner codec's state as a sender
    decode: Any  # the same as a receiver; the only one that a receiver uses


def error_feedback(
    codec: selector.CodecOrSelector, beta: float = 1.0
) -> selector.CodecOrSelector:
    """Adds what a tensor lost to the next one: a = x + β e, e' = a - decode(encode(a)).

    For sums of tensors over time, such as gradients (Karimireddy et al. 2019): what a
    biased codec drops is sent later. Not for hidden states of changing examples.
    With β below 1 what waits fades: around `sparse_loco` it is the momentum of
    SparseLoCo (arXiv 2508.15706), with β = 0.95 in its authors' code.
    Payload and wire: the inner codec's. A codec after it in a chain is not fed back:
    `error_feedback(svd(0.2)|fp16)`, not `error_feedback(svd(0.2))|fp16`.
    Where the residual would be NaN or Inf, it is 0: one bad tensor does not last.

    >>> from nebula_jax.communication.codecs import block_floats
    >>> codec = error_feedback(block_floats.e3m0())
    >>> x = jnp.array([8.0, 5.0])
    >>> state = codec.init(x)
    >>> payload, state = codec.encode(x, state)  # 5 is sent as 4
    >>> state.residual[0].tolist()
    [0.0, 1.0]
    >>> payload, state = codec.encode(x, state)  # 6 is sent as 8
    >>> state.residual[0].tolist()
    [0.0, -2.0]

    Args:
      beta: β, in (0, 1]; part of the name unless it is 1.

    Returns:
      A Codec around a codec, a Selector around a Selector.

    Raises:
      ValueError: if `codec` is no codec, or beta out of its range.
    """
    check_codec(codec)
    codec_lib.check_share("beta", beta)

    def init(spec: codec_lib.Spec) -> Feedback:
        residual = [jnp.zeros(leaf.shape, jnp.float32) for leaf in leaves.floats(spec)]
        return Feedback(tuple(residual), codec.init(spec), codec.init(spec))

    def wrap(inner: codec_lib.Codec) -> codec_lib.Codec:
        return codec_lib.Codec(
            init,
            functools.partial(_encode_with_feedback, inner, beta),
            functools.partial(_decode_with_feedback, inner),
        )

    if isinstance(codec, codec_lib.Codec):
        made: selector.CodecOrSelector = wrap(codec)
    else:
        made = codec._replace(
            codecs=tuple(map(wrap, codec.codecs)),
            choose=lambda arrays, state, step: codec.choose(arrays, state.encode, step),
        )
    arguments = codec.name if beta == 1 else f"{codec.name}, {beta}"
    return made._replace(name=f"error_feedback({arguments})", zstd=codec.zstd)


def _encode_with_feedback(
    inner: codec_lib.Codec, beta: float, arrays: codec_lib.Arrays, state: Feedback
) -> tuple[codec_lib.Payload, Feedback]:
    waiting = state.residual
    if beta != 1:
        # It is finite anyway: a selection between a product and a sum keeps XLA from
        # making them one operation with one rounding, in some programs and not others.
        waiting = tuple(_finite_or_zero(beta * each) for each in waiting)
    wanted = [
        leaf.astype(jnp.float32) + each
        for leaf, each in zip(leaves.floats(arrays), waiting, strict=True)
    ]
    payload, encoder = inner.encode(leaves.with_floats(arrays, wanted), state.encode)
    got, decoder = _decode_as_receiver(inner, payload, state.decode)
    residual = tuple(
        _finite_or_zero(want - leaf.astype(jnp.float32))
        for want, leaf in zip(wanted, leaves.floats(got), strict=True)
    )
    return payload, Feedback(residual, encoder, decoder)


def _decode_with_feedback(
    inner: codec_lib.Codec, payload: codec_lib.Payload, state: codec_lib.State
) -> tuple[codec_lib.Arrays, Feedback]:
    arrays, decoder = inner.decode(payload, state.decode)
    return arrays, state.replace(decode=decoder)


def from_step(n: int, codec: selector.CodecOrSelector) -> selector.Selector:
    """Begins to compress at optimization step n, counted from 1 (Figure 10).

    Option 0: the arrays as they are, while the step is below n. Option 1 + i: option i
    of the inner codec. State: of the inner codec. Payload, wire, NaN: of the arrays,
    then of the inner codec.

    >>> from nebula_jax.communication.codecs import floats
    >>> codec = from_step(2, floats.fp16())
    >>> [codec.encode(jnp.ones(3), (), step)[0].option for step in (1, 2)]
    [0, 1]

    Args:
      n: the first step that is compressed.

    Raises:
      ValueError: if an argument is out of its range.
    """
    check_codec(codec)
    codec_lib.check_integer("n", n, 1)
    inner = selector.as_selector(codec)
    plain = codec_lib.identity()._replace(init=codec.init)

    def choose(arrays: codec_lib.Arrays, state: codec_lib.State, step: int) -> int:
        return 0 if step < n else 1 + inner.choose(arrays, state, step)

    name = f"from_step({n}, {inner.name})"
    return inner._replace(codecs=(plain, *inner.codecs), choose=choose, name=name)


def check_codec(codec: Any) -> None:
    """Raises ValueError unless `codec` is a Codec or a Selector."""
    if not isinstance(codec, codec_lib.Codec | selector.Selector):
        raise ValueError(f"codec must be a codec such as fp16, not {codec!r}")


def _decode_as_receiver(
    codec: codec_lib.Codec, payload: codec_lib.Payload, state: codec_lib.State
) -> tuple[codec_lib.Arrays, codec_lib.State]:
    """Decodes such that what is computed on it has the same bits on both ends.

    The receiver decodes the same payload in another program. Two things could make that
    differ: XLA dropping a rounding to bfloat16 and back, which the barrier prevents;
    and a product and sum that become one operation with one rounding here but not
    there, which the selection between them prevents. Inf comes out as NaN.
    """
    payload, state = jax.lax.optimization_barrier((payload, state))
    arrays, state = codec.decode(payload, state)
    return leaves.encode(
        lambda leaf: jnp.where(jnp.isfinite(leaf), leaf, jnp.nan), arrays
    ), state


def _finite_or_zero(leaf: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(leaf), leaf, 0.0)
