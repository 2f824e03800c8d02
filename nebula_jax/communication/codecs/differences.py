"""Differences from an example's values at its last visit: AQ-SGD.

B batch.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication import ranks, selector
from nebula_jax.communication.codecs import leaves, wrappers


@struct.dataclass
class Memory:
    """The state of `delta`, equal on both ends but for `encode`.

    values: per floating-point leaf [examples, ...] of its dtype, what the receiver has.
    seen: [examples] bool; which have crossed, and are finite.
    encode: the inner codec's state as a sender.
    decode: the inner codec's state as a receiver; the only one a receiver uses.
    """

    values: tuple[jax.Array, ...]
    seen: jax.Array
    encode: Any
    decode: Any


@struct.dataclass
class Visit:
    """A payload of `delta`.

    index: [B] int32, numbers of the examples.
    payload: the other arrays as they are, or the inner codec's of a - m.
    examples: index is in [0, examples); static.
    """

    index: jax.Array
    payload: Any
    examples: int = struct.field(pytree_node=False)

    def check_values(self) -> None:
        """Checks, on the host, that these are different examples that exist."""
        _check_index(np.asarray(self.index), self.examples)


def delta(
    codec: selector.CodecOrSelector, examples: int, index: str = "index"
) -> selector.Selector:
    """Sends activations as differences from the same example's last visit (AQ-SGD).

    Wang et al. 2022: m(ξ) = a(ξ) on the first visit, in full; then d = Q(a - m) is
    sent, both ends add it to m, and the receiver computes on m. It needs a(ξ) to change
    slowly: dropout and masks drawn anew each visit make the difference large.
    Option 0: a batch with any example not seen before, as it is. Option 1 + i: option i
    of the inner codec on the differences; floating-point leaves only are differences,
    others and `index` cross as they are. Nothing but zstd may follow it in a chain.
    Payload: index [B] int32, and the other arrays or the inner payload.
    Wire: n itemsize + 4 B bytes, then the inner codec's + 4 B.
    An example that came out NaN or Inf crosses in full at its next visit.
    State: `examples` times an example's floating-point leaves, on both ends.

    >>> from nebula_jax.communication.codecs import floats
    >>> codec = delta(floats.fp16(), examples=10)
    >>> batch = {"index": jnp.array([7]), "h": jnp.array([[1.0]])}
    >>> state = codec.init(batch)
    >>> first, state = codec.encode(batch, state)
    >>> again, state = codec.encode(batch | {"h": jnp.array([[1.5]])}, state)
    >>> first.option, again.option, again.payload.payload["h"].data.tolist()
    (0, 1, [[0.5]])

    Args:
      codec: the inner one, Q; for convergence its relative error should be below √½.
      examples: index is in [0, examples).
      index: key or attribute of the leaf [B] int32 that names each example; the other
        leaves are [B, ...].

    Raises:
      ValueError: if an argument is out of its range; by `choose`, if an index is out of
        its range, or twice in one batch.
    """
    wrappers.check_codec(codec)
    if type(examples) is not int or not 1 <= examples < 2**31:
        raise ValueError(f"examples must be 1 to 2^31 - 1, not {examples!r}")
    if type(index) is not str or not index:
        raise ValueError(f"index must be a leaf's name, not {index!r}")

    inner = selector.as_selector(codec)
    made = _Delta(inner, examples, index)
    full = codec_lib.Codec(made.init, made.keep, made.kept)
    later = tuple(
        codec_lib.Codec(
            made.init,
            functools.partial(made.encode, each),
            functools.partial(made.decode, each),
        )
        for each in inner.codecs
    )
    name = f"delta({inner.name}, {examples}, {index})"
    return selector.Selector(
        (full, *later), made.choose, ends_chain=True, name=name, zstd=inner.zstd
    )


class _Delta(NamedTuple):
    """The arguments of a `delta`, and the functions of its codecs."""

    inner: selector.Selector
    examples: int
    key: str

    def init(self, spec: codec_lib.Spec) -> Memory:
        _, rest = _without(spec, self.key)
        values = tuple(
            jnp.zeros((self.examples, *leaf.shape[1:]), leaf.dtype)
            for leaf in leaves.floats(spec)
        )
        seen = jnp.zeros(self.examples, jnp.bool_)
        return Memory(values, seen, self.inner.init(rest), self.inner.init(rest))

    # Option 0: the batch as it is.

    def keep(
        self, arrays: codec_lib.Arrays, state: codec_lib.State
    ) -> tuple[Visit, Memory]:
        where, rest = _without(arrays, self.key)
        payload = Visit(where, rest, self.examples)
        return payload, _store(state, where, leaves.floats(rest))

    def kept(
        self, payload: Visit, state: codec_lib.State
    ) -> tuple[codec_lib.Arrays, Memory]:
        where, rest = payload.index, payload.payload
        arrays = leaves.replace_named(rest, self.key, where)
        return arrays, _store(state, where, leaves.floats(rest))

    # Option 1 + i: differences, by option i of the inner codec.

    def encode(
        self, each: codec_lib.Codec, arrays: codec_lib.Arrays, state: codec_lib.State
    ) -> tuple[Visit, Memory]:
        where, rest = self.differences(arrays, state)
        payload, encoder = each.encode(rest, state.encode)
        got, decoder = wrappers.decode_as_receiver(each, payload, state.decode)
        _, state = self.add(state, where, got)
        state = state.replace(encode=encoder, decode=decoder)
        return Visit(where, payload, self.examples), state

    def decode(
        self, each: codec_lib.Codec, payload: Visit, state: codec_lib.State
    ) -> tuple[codec_lib.Arrays, Memory]:
        got, decoder = wrappers.decode_as_receiver(each, payload.payload, state.decode)
        arrays, state = self.add(state, payload.index, got)
        return arrays, state.replace(decode=decoder)

    def differences(
        self, arrays: codec_lib.Arrays, state: codec_lib.State
    ) -> tuple[jax.Array, Any]:
        where, rest = _without(arrays, self.key)
        floats = [
            leaf - memory[where]
            for leaf, memory in zip(leaves.floats(rest), state.values, strict=True)
        ]
        return where, leaves.with_floats(rest, floats)

    def add(
        self, state: codec_lib.State, where: jax.Array, got: Any
    ) -> tuple[Any, Memory]:
        """Adds decoded differences to the memory; both ends do, to the same bits."""
        floats = [
            memory[where] + leaf
            for memory, leaf in zip(state.values, leaves.floats(got), strict=True)
        ]
        arrays = leaves.with_floats(got, floats)
        arrays = leaves.replace_named(arrays, self.key, where)
        return arrays, _store(state, where, floats)

    def choose(
        self, arrays: codec_lib.Arrays, state: codec_lib.State, step: int
    ) -> int:
        where = np.asarray(ranks.everywhere(_without(arrays, self.key)[0]))
        _check_index(where, self.examples)
        if not np.all(np.asarray(ranks.everywhere(state.seen))[where]):
            return 0
        if len(self.inner.codecs) == 1:
            return 1
        rest = self.differences(arrays, state)[1]
        return 1 + self.inner.choose(rest, state.encode, step)


def _store(state: codec_lib.State, where: jax.Array, floats: list[jax.Array]) -> Memory:
    """Returns the memory with new values of these examples."""
    finite = jnp.ones(where.shape, jnp.bool_)
    for leaf in floats:
        finite &= jnp.all(jnp.isfinite(leaf), axis=tuple(range(1, leaf.ndim)))
    values = tuple(
        memory.at[where].set(leaf)
        for memory, leaf in zip(state.values, floats, strict=True)
    )
    # What came out NaN or Inf counts as not seen: it crosses in full next time.
    return state.replace(values=values, seen=state.seen.at[where].set(finite))


def _without(arrays: Any, name: str) -> tuple[jax.Array, Any]:
    """Returns the leaf of that name, and the arrays with None in its place."""
    where = leaves.named(arrays, name)
    if where.dtype != jnp.int32 or len(where.shape) != 1:
        raise ValueError(
            f"{name!r} must be int32 [B], not {where.dtype} {list(where.shape)}"
        )
    return where, leaves.replace_named(arrays, name, None)


def _check_index(where: np.ndarray, examples: int) -> None:
    for value in where:
        if not 0 <= value < examples:
            raise ValueError(f"index {value} is not in [0, {examples})")
    values, counts = np.unique(where, return_counts=True)
    if np.any(counts > 1):
        raise ValueError(
            f"index {values[counts > 1][0]} is twice in one batch: one of its"
            " differences would be lost"
        )
