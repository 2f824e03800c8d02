"""Matrix products with operands of lower precision, in both directions.

`preferred_element_type` alone makes the forward product fast. In the backward pass the
incoming gradient is float32, so XLA widens the other operand to it: two thirds of the
work at half the speed. Here the gradient is rounded like the other operands. Results,
forward and backward, are accumulated in float32 and stay float32.

Batched products (attention) keep XLA's own gradient: they are small, and XLA's CPU
backend has no kernel for some of their transposes in bfloat16.
"""

import functools
import string
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util

Residuals = tuple[jax.Array | None, jax.Array | None]


def einsum(
    subscripts: str, a: jax.Array, b: jax.Array, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """Computes an einsum with operands of `dtype` and a float32 result.

    `subscripts` have two operands and an explicit output; every letter of an operand is
    in the other one or in the output. `a` and `b` are float32; or of `dtype` already,
    if they are not differentiated. With `dtype` float32 it is jnp.einsum.
    """
    both, out = subscripts.split("->")
    left, right = both.split(",")
    if set(left) & set(right) & set(out):
        return _product(subscripts, a.astype(dtype), b.astype(dtype))
    return _matrix_product(subscripts, a, b, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def _matrix_product(
    subscripts: str, a: jax.Array, b: jax.Array, dtype: jax.typing.DTypeLike
) -> jax.Array:
    return _product(subscripts, a.astype(dtype), b.astype(dtype))


def _forward(
    subscripts: str, a: Any, b: Any, dtype: jax.typing.DTypeLike
) -> tuple[jax.Array, Residuals]:
    """Computes the product; keeps an operand if the other one is differentiated.

    A frozen matrix is not, and its input need not be kept (`symbolic_zeros`).
    """
    left, right = a.value.astype(dtype), b.value.astype(dtype)
    kept = left if b.perturbed else None, right if a.perturbed else None
    return _product(subscripts, left, right), kept


def _backward(
    subscripts: str, dtype: jax.typing.DTypeLike, kept: Residuals, gradient: Any
) -> Residuals:
    """Computes the gradients of the operands that are differentiated."""
    if isinstance(gradient, jax.custom_derivatives.SymbolicZero):
        return None, None
    gradient = gradient.astype(dtype)
    both, out = subscripts.split("->")
    left, right = both.split(",")
    a, b = kept
    return (
        None if b is None else _product(f"{out},{right}->{left}", gradient, b),
        None if a is None else _product(f"{left},{out}->{right}", a, gradient),
    )


_matrix_product.defvjp(_forward, _backward, symbolic_zeros=True)


def _product(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)


def dot_general(
    a: jax.Array,
    b: jax.Array,
    dimension_numbers: jax.lax.DotDimensionNumbers,
    precision: jax.lax.PrecisionLike = None,
    *,
    dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """Computes `einsum` with the arguments of `jax.lax.dot_general`, for Flax."""
    del precision
    (a_sum, b_sum), (a_batch, b_batch) = dimension_numbers
    letters = iter(string.ascii_letters)
    left = [next(letters) for _ in range(a.ndim)]
    right = [next(letters) for _ in range(b.ndim)]
    for here, there in zip((*a_sum, *a_batch), (*b_sum, *b_batch), strict=True):
        right[there] = left[here]
    out = [left[axis] for axis in a_batch]
    out += [left[axis] for axis in range(a.ndim) if axis not in (*a_sum, *a_batch)]
    out += [right[axis] for axis in range(b.ndim) if axis not in (*b_sum, *b_batch)]
    subscripts = f"{''.join(left)},{''.join(right)}->{''.join(out)}"
    return einsum(subscripts, a, b, dtype)


def cast_kernels(params: Any, dtype: jax.typing.DTypeLike) -> Any:
    """Casts matrices of linear layers: frozen ones are rounded once, not in every pass.

    A backward pass keeps no rounded copy. Results are the same to the bit.
    """
    flat = traverse_util.flatten_dict(params)
    return traverse_util.unflatten_dict(
        {
            path: leaf.astype(dtype) if path[-1] == "kernel" else leaf
            for path, leaf in flat.items()
        }
    )
