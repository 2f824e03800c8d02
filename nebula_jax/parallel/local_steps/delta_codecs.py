"""Codecs of the messages of local steps, as they are run.

A message is self-contained: whatever was sent before, it is decoded alike.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nebula_jax.communication import codec as codec_lib
from nebula_jax.parallel import cosine


def check_codec(codec: codec_lib.Codec) -> None:
    """Checks that a message can be decoded by itself, whatever was sent before.

    Raises:
      ValueError: if the receiver of this codec has a state that changes its results.
    """
    first = {
        "vector": jnp.linspace(-1.0, 1.0, 64),
        "matrix": jnp.cos(jnp.arange(256.0)).reshape(16, 16),
    }
    second = jax.tree.map(lambda leaf: leaf**2, first)
    state = codec.init(jax.eval_shape(lambda: first))
    _, after = codec.encode(first, state)
    payload, _ = codec.encode(second, after)
    one, two = (codec.decode(payload, each)[0] for each in (state, after))
    if not all(jax.tree.leaves(jax.tree.map(np.array_equal, one, two))):
        raise ValueError(f"{codec.name}: its receiver remembers what came before")


class Coder:
    """A codec of the messages, ready to be run."""

    def __init__(
        self,
        codec: codec_lib.Codec,
        specs: Sequence[Any],
        places: Sequence[Any],
        everywhere: Any,
    ) -> None:
        """Compiles nothing yet.

        Args:
          codec: of the messages.
          specs: of the messages of each fragment, and of the closing one.
          places: shardings of each, or None.
          everywhere: that of a payload; None for one device.
        """
        self.encode = jax.jit(codec.encode, donate_argnums=1, out_shardings=everywhere)
        self.decode = [
            jax.jit(self._decoded(codec, spec), out_shardings=(place, None))
            for spec, place in zip(specs, places, strict=True)
        ]
        """For each: payload -> (message, if all of its delta is finite)."""
        self.similarity = jax.jit(functools.partial(_similarity, codec))
        """Delta -> its cosine as it is and as it is decoded."""

    def _decoded(self, codec: codec_lib.Codec, spec: Any) -> Any:
        def decode(payload: Any) -> tuple[Any, jax.Array]:
            message, _ = codec.decode(payload, codec.init(spec))
            is_finite = jnp.asarray(True)
            for leaf in jax.tree.leaves(message["delta"]):
                is_finite &= jnp.all(jnp.isfinite(leaf))
            return message, is_finite

        return decode


def _similarity(codec: codec_lib.Codec, delta: Any) -> jax.Array:
    """Returns the cosine of a delta as it is and as it is decoded."""
    state = codec.init(jax.eval_shape(lambda: delta))
    payload, _ = codec.encode(delta, state)
    return cosine.similarity(delta, codec.decode(payload, state)[0])
