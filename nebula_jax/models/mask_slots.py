"""Arrays at a bounded number of positions, so that jit sees one shape.

A row has M slots for positions, ascending. A row with fewer positions leaves slots
empty; the position in an empty slot is L, just past the row.

B batch, L length, M slots of a row, P slots of a whole batch, D width.
"""

import jax
import jax.numpy as jnp


def gather(values: jax.Array, positions: jax.Array) -> jax.Array:
    """Reads values [B, L, ...] at positions [B, M] int32 -> [B, M, ...]; 0 if empty."""
    return jax.vmap(lambda row, at: row.at[at].get(mode="fill", fill_value=0))(
        values, positions
    )


def gather_positions(values: jax.Array, positions: jax.Array) -> jax.Array:
    """Reads values [B, L, D] at positions of a whole batch -> [P, D]; 0 if empty.

    `positions` are [P] int32, b L + l for place l of row b; B L in empty slots.
    """
    return gather(values.reshape(1, -1, values.shape[-1]), positions[None])[0]


def scatter(values: jax.Array, positions: jax.Array, written: jax.Array) -> jax.Array:
    """Writes [B, M] at positions [B, M] int32 of values [B, L], and no empty slot."""
    return jax.vmap(lambda row, at, new: row.at[at].set(new, mode="drop"))(
        values, positions, written
    )


def mark(positions: jax.Array, length: int) -> jax.Array:
    """Converts positions [B, M] int32 to marks [B, L] bool, true at the positions."""
    marks = jnp.zeros((positions.shape[0], length), bool)
    return scatter(marks, positions, jnp.ones(positions.shape, bool))


def find(marks: jax.Array, slots: int) -> jax.Array:
    """Converts marks [B, L] bool to positions [B, M] int32, the inverse of `mark`.

    `slots` is M; marks beyond the first M of a row are dropped.
    """
    length = marks.shape[-1]
    places = jnp.where(marks, jnp.arange(length, dtype=jnp.int32), length)
    return jnp.sort(places, axis=-1)[:, :slots]
