"""A learned narrow layer at the cut: fewer columns cross, forward and back.

    z = (h - m) A        the front sends R columns of D
    h' = z B + m         the back makes D of them again

At the start A has the first right-singular vectors of activations less their mean m, so
h' is the best approximation of rank R, and with R = D it is h. Both matrices are then
trained. Columns are in the order of singular values. A back whose readers of h are all
linear needs no B: W and b of a reader become B W and b + m W, and the gradient that
goes back is as narrow as z (`read_through`).

N tokens, D width, R rank.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

POWER = 0.25
"""Columns of z are divided by their second moment to this power, and rows of B
multiplied: 0 leaves z as the singular vectors make it, 1/2 makes all columns alike.
Between them, since Adam and a quantizer treat columns alike, but noise is in the last
ones. In one run each of Table 5's `bottleneck of 128` 0 and 1/2 cost 0.02 and 0.04 nats
more."""


class Moments(NamedTuple):
    """The sums over tokens that a bottleneck begins with."""

    tokens: jax.Array  # [] float32, how many
    total: jax.Array  # [D] float32, of activations
    products: jax.Array  # [D, D] float32, of their products


class Start(NamedTuple):
    """A bottleneck before its first step."""

    down: np.ndarray  # [D, R] float32, A
    up: np.ndarray  # [R, D] float32, B
    mean: np.ndarray  # [D] float32, m


def moments(hidden: jax.Array, mask: jax.Array) -> Moments:
    """Sums over tokens of a batch [..., D] float32; the mask [...] is false at padding.

    Add those of several batches with `jax.tree.map`.
    """
    rows = jnp.where(mask[..., None], hidden, 0.0).reshape(-1, hidden.shape[-1])
    return Moments(
        jnp.sum(mask, dtype=jnp.float32),
        jnp.sum(rows, axis=0),
        jnp.matmul(rows.T, rows, precision=jax.lax.Precision.HIGHEST),
    )


def start(found: Moments, rank: int) -> Start:
    """Returns the best bottleneck of rank R, 1 to D, for activations of these moments.

    ValueError if there is no token, or a sum is not finite.
    """
    count, total, products = (np.asarray(part, np.float64) for part in found)
    if count < 1 or not np.isfinite(products).all():
        raise ValueError("a bottleneck needs tokens with finite activations to begin")
    mean = total / count
    values, vectors = np.linalg.eigh(products / count - np.outer(mean, mean))
    order = np.argsort(-values, kind="stable")[:rank]
    values, vectors = values[order], vectors[:, order]
    # Directions in which tokens hardly differ are not blown up without end.
    scale = np.maximum(values, 1e-6 * max(values[0], 1e-30)) ** POWER
    return Start(
        (vectors / scale).astype(np.float32),
        (vectors * scale).T.astype(np.float32),
        mean.astype(np.float32),
    )


def blank(width: int, rank: int) -> Start:
    """Returns zeros of a start's shapes, in the place of what a checkpoint brings."""
    return Start(
        np.zeros((width, rank), np.float32),
        np.zeros((rank, width), np.float32),
        np.zeros(width, np.float32),
    )


def narrowing(beginning: Start) -> dict[str, np.ndarray]:
    """Returns the parameters of the front's linear layer, `kernel` and `bias`."""
    down = beginning.down
    return {"kernel": down, "bias": -(beginning.mean @ down)}


def read_through(
    reader: dict[str, jax.Array], beginning: Start
) -> dict[str, jax.Array]:
    """Returns a linear reader of h as one of z: `kernel` [D, ...] becomes [R, ...]."""
    kernel = reader["kernel"]
    highest = jax.lax.Precision.HIGHEST
    return {
        "kernel": jnp.tensordot(beginning.up, kernel, 1, precision=highest),
        "bias": reader["bias"]
        + jnp.tensordot(beginning.mean, kernel, 1, precision=highest),
    }


Params = dict[str, jax.Array]  # `kernel` and `bias` of one end


class Pair(NamedTuple):
    """A bottleneck around the line for any cut; see `pair`."""

    width: int
    rank: int

    def init(self, key: jax.Array) -> tuple[Params, Params]:
        """Draws the parameters of both ends where no activations are at hand.

        An orthonormal projection of `narrow`, for the front, and the way back of
        `widen`. Both sides give the same key, of which each keeps its own part.
        """
        down, _ = jnp.linalg.qr(jax.random.normal(key, (self.width, self.rank)))
        return (
            {"kernel": down, "bias": jnp.zeros(self.rank)},
            {"kernel": down.T, "bias": jnp.zeros(self.width)},
        )

    def narrow(self, params: Params, hidden: jax.Array) -> jax.Array:
        """Computes z, which the front sends: [..., D] float32 -> [..., R] float32."""
        return _linear(params, hidden)

    def widen(self, params: Params, sent: jax.Array) -> jax.Array:
        """Computes h', which the back reads: [..., R] float32 -> [..., D] float32."""
        return _linear(params, sent)


def _linear(params: Params, values: jax.Array) -> jax.Array:
    product = values @ params["kernel"]
    return product + jnp.broadcast_to(params["bias"], product.shape)


def pair(width: int, rank: int) -> Pair:
    """Makes a learned pair around the line: the front narrows, the back widens.

        around = nebula.cut.bottleneck(width=768, rank=96)
        of_front, of_back = around.init(key)

        def front(params, batch, rng):
            hidden = stem.apply(params["stem"], batch)
            return around.narrow(params["narrow"], hidden)

        def back(params, sent, batch, rng):
            hidden = around.widen(params["widen"], sent)

    Args:
      width: D, of the activations' last axis.
      rank: R, columns that cross.

    Raises:
      ValueError: if R is out of its range.
    """
    if not 1 <= rank <= width:
        raise ValueError(f"rank must be 1 to {width}, not {rank}")
    return Pair(width, rank)
