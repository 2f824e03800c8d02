"""The gradient of a batch, one micro-batch after the other: less memory, the same step.

A loss is given as what each micro-batch adds to the batch's: its sum is divided by the
weight of the whole batch, which is known before. So gradients add up to those of the
batch, and the optimizer takes one step.

B rows of a batch, N micro-batches. Micro-batch n has the rows n, n + N, n + 2 N, ...:
every device holds some of each.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Outcome(NamedTuple):
    """An outcome of a loss, of a micro-batch or of all of them."""

    loss: jax.Array  # [] float32, what is added to the batch's loss
    sums: Any  # a tree of what is added up
    rows: Any  # a tree of arrays with the rows of the micro-batch, [B / N, ...]


Loss = Callable[[Any, Any, jax.Array | None], Outcome]
"""(parameters, micro-batch [B / N, ...], its number) -> Outcome; the number is None if
there is one micro-batch alone."""


def key(rng: jax.Array, number: jax.Array | None) -> jax.Array:
    """Returns the key of a micro-batch; of the only one, the batch's."""
    return rng if number is None else jax.random.fold_in(rng, number)


def split(rows: jax.Array, micro_batches: int) -> jax.Array:
    """Divides the rows of a batch, [B, ...] -> [N, B / N, ...]."""
    return jnp.swapaxes(rows.reshape(-1, micro_batches, *rows.shape[1:]), 0, 1)


def join(rows: jax.Array) -> jax.Array:
    """Joins the rows of micro-batches, [N, B / N, ...] -> [B, ...]."""
    return jnp.swapaxes(rows, 0, 1).reshape(-1, *rows.shape[2:])


def total(loss: Loss, params: Any, batch: Any, micro_batches: int) -> Outcome:
    """Computes the loss of a batch [B, ...], which N divides, without a gradient."""
    if micro_batches == 1:
        return loss(params, batch, None)

    def step(before: Any, part: Any) -> tuple[Any, Any]:
        number, rows = part
        outcome = loss(params, rows, number)
        return jax.tree.map(jnp.add, before, outcome[:2]), outcome.rows

    return _scan(loss, step, params, batch, micro_batches, ())[1]


def gradients(
    loss: Loss, params: Any, batch: Any, micro_batches: int
) -> tuple[Any, Outcome]:
    """Computes the gradient of a batch's loss, and its outcome; given as of `total`."""

    def outcome_of(params: Any, rows: Any, number: Any) -> tuple[jax.Array, Outcome]:
        outcome = loss(params, rows, number)
        return outcome.loss, outcome

    gradient = jax.grad(outcome_of, has_aux=True)
    if micro_batches == 1:
        return gradient(params, batch, None)

    def step(before: Any, part: Any) -> tuple[Any, Any]:
        number, rows = part
        grads, outcome = gradient(params, rows, number)
        more = *outcome[:2], grads
        return jax.tree.map(jnp.add, before, more), outcome.rows

    zeros = (jax.tree.map(jnp.zeros_like, params),)
    (grads,), outcome = _scan(loss, step, params, batch, micro_batches, zeros)
    return grads, outcome


def _scan(
    loss: Loss,
    step: Callable[[Any, Any], tuple[Any, Any]],
    params: Any,
    batch: Any,
    micro_batches: int,
    more: tuple[Any, ...],
) -> tuple[tuple[Any, ...], Outcome]:
    """Adds up loss, sums and `more` over all micro-batches, in their order."""
    numbers = jnp.arange(micro_batches)
    divided = jax.tree.map(lambda leaf: split(leaf, micro_batches), batch)
    first = jax.tree.map(lambda leaf: leaf[0], divided)
    shapes = jax.eval_shape(loss, params, first, numbers[0])
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes[:2])
    (added, sums, *rest), rows = jax.lax.scan(step, (*zeros, *more), (numbers, divided))
    return tuple(rest), Outcome(added, sums, jax.tree.map(join, rows))
