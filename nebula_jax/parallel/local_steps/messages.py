"""The messages of rounds: what they have beside a delta, and how they are encoded.

A message is self-contained: it decodes to the same values whatever was sent before it.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nebula_jax import errors
from nebula_jax.communication import codec as codec_lib
from nebula_jax.training import diloco

DIGEST_BYTES = 32

Key = tuple[int, int]  # step after which a round's messages are sent, fragment


class Head(NamedTuple):
    """The facts of a message beside its delta; integers from 0 to 2^32 - 1."""

    step: int  # after which it was sent: this names the round
    fragment: int
    version: int  # outer steps that made the anchor it counts from
    is_stopping: int = 0  # 1 if this cluster requests the end of the run


def spec(fragment: diloco.Fragment) -> dict[str, Any]:
    """Returns the specs of a message's arrays, from specs of its parameters."""
    return {
        "head": jax.ShapeDtypeStruct((len(Head._fields),), jnp.uint32),
        "anchor": jax.ShapeDtypeStruct((DIGEST_BYTES,), jnp.uint8),
        "delta": {
            name: jax.ShapeDtypeStruct(leaf.shape, diloco.type_of_anchor(leaf))
            for name, leaf in fragment.items()
        },
    }


@functools.cache  # replicas of one process have one codec
def check_codec(codec: codec_lib.Codec) -> None:
    """Raises errors.SettingsError unless a message decodes without those before it."""
    first = {
        "vector": jnp.linspace(-1.0, 1.0, 64),
        "matrix": jnp.cos(jnp.arange(256.0)).reshape(16, 16),
    }
    second = jax.tree.map(lambda leaf: leaf**2, first)

    @jax.jit  # a program, in place of one for each operation
    def received(first: Any, second: Any) -> Any:
        state = codec.init(jax.eval_shape(lambda: first))
        _, after = codec.encode(first, state)
        payload, _ = codec.encode(second, after)
        return [codec.decode(payload, each)[0] for each in (state, after)]

    one, two = received(first, second)
    if not all(jax.tree.leaves(jax.tree.map(np.array_equal, one, two))):
        raise errors.SettingsError(
            f"codec={codec.name}: its receiver remembers what came before"
        )
