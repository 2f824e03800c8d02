"""A body of today's encoders as a value: ModernBERT's (arXiv 2412.13663).

Its layers normalize before attention and feed-forward, and once after the last; turn
queries and keys by their positions in place of a table (RoPE, 2104.09864); have a gated
feed-forward (GeGLU, 2002.05202) and no biases; and attend to all positions in every
third layer, to near ones in the others. Here is what has no parameters; the layers are
`transformer.PreNormBlock`.

B batch, L length, H heads, K head width, Q query positions, M key positions.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

GLOBAL_THETA, LOCAL_THETA = 160_000.0, 10_000.0
"""Bases of the wave lengths by which positions turn, in layers of either reach."""
INNER_MULTIPLE = 32  # divides a gated feed-forward's units, so that devices share them


class Reach(NamedTuple):
    """The positions that a layer attends to, and the base by which they turn."""

    theta: float
    window: int | None  # width of the window around a position; None for all positions


@dataclasses.dataclass(frozen=True)
class Body:
    """The numbers of the body; the defaults are ModernBERT's."""

    global_every: int = 3  # the first of every so many layers attends to all positions
    window: int = 128  # width of the others' window: half of it on each side

    def reach(self, layer: int) -> Reach:
        """Returns the reach of a layer, counted from 0.

        >>> [Body().reach(layer).window for layer in range(4)]
        [None, 128, 128, None]
        """
        if layer % self.global_every == 0:
            return Reach(GLOBAL_THETA, None)
        return Reach(LOCAL_THETA, self.window)


def inner_units(feed_forward: int) -> int:
    """Returns the inner units F of three matrices as large as two of `feed_forward`.

    >>> inner_units(1024)
    672
    """
    return max(1, round(feed_forward * 2 / 3 / INNER_MULTIPLE)) * INNER_MULTIPLE


def turn(vectors: jax.Array, theta: float) -> jax.Array:
    """Turns queries or keys [B, L, H, K] float32, K even, by their positions (RoPE).

    Number i of a vector's first half and number i of its second half are a point of the
    plane, which turns by p theta^(-2i/K) at position p: so the product of a query and a
    key depends on their distance alone.
    """
    _, length, _, width = vectors.shape
    rates = theta ** (-np.arange(0, width, 2) / width)
    angles = (np.arange(length)[:, None] * rates)[None, :, None]  # [1, L, 1, K / 2]
    cos, sin = (np.float32(each) for each in (np.cos(angles), np.sin(angles)))
    first, second = jnp.split(vectors, 2, axis=-1)
    turned = first * cos - second * sin, second * cos + first * sin
    return jnp.concatenate(turned, axis=-1)


def near(attention_mask: jax.Array, length: int, window: int | None) -> jax.Array:
    """Narrows an attention mask, [B, M] or [B, Q, M] bool, Q = M, to a window, if any.

    It then is [B, Q, M], true in the window around each position.
    """
    if window is None:
        return attention_mask
    if attention_mask.ndim == 2:
        attention_mask = attention_mask[:, None, :]
    places = np.arange(length)
    is_near = np.abs(places[:, None] - places) <= window // 2
    return attention_mask & is_near[None]
