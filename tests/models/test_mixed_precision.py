import jax
import jax.numpy as jnp
import pytest

from nebula_jax.models import mixed_precision

SHAPES = [
    ("bld,df->blf", (3, 5, 8), (8, 6)),
    ("bld,dhk->blhk", (3, 5, 8), (8, 2, 4)),
    ("blhk,hkd->bld", (3, 5, 2, 4), (2, 4, 8)),
    ("bmd,vd->bmv", (1, 7, 8), (11, 8)),
    ("bqhk,bmhk->bhqm", (3, 5, 2, 4), (3, 6, 2, 4)),
]


def pulled(product, a, b):
    def loss(a, b):
        return jnp.sum(jnp.sin(product(a, b)))

    return product(a, b), jax.grad(loss, (0, 1))(a, b)


@pytest.mark.parametrize(("subscripts", "left", "right"), SHAPES)
def test_float32_is_einsum(subscripts, left, right):
    a = jax.random.normal(jax.random.key(0), left)
    b = jax.random.normal(jax.random.key(1), right)
    ours = pulled(
        lambda a, b: mixed_precision.einsum(subscripts, a, b, jnp.float32), a, b
    )
    theirs = pulled(lambda a, b: jnp.einsum(subscripts, a, b), a, b)
    for mine, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert jnp.allclose(mine, other, atol=1e-6)


@pytest.mark.parametrize(("subscripts", "left", "right"), SHAPES)
def test_bfloat16_rounds_operands_and_nothing_else(subscripts, left, right):
    # Small integers are exact in bfloat16, and so are their sums here in float32.
    a = jax.random.randint(jax.random.key(0), left, -4, 5).astype(jnp.float32)
    b = jax.random.randint(jax.random.key(1), right, -4, 5).astype(jnp.float32)

    def pull(product):
        value, back = jax.vjp(product, a, b)
        return value, back(jnp.round(value))

    ours = pull(lambda a, b: mixed_precision.einsum(subscripts, a, b, jnp.bfloat16))
    theirs = pull(lambda a, b: jnp.einsum(subscripts, a, b))
    assert jnp.array_equal(ours[0], theirs[0])
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(ours))
    for mine, other in zip(ours[1], theirs[1], strict=True):
        # The gradient itself is rounded: 8 bits of 256 are enough for most of it.
        assert jnp.allclose(mine, other, rtol=0.02, atol=0.02 * jnp.abs(other).max())


def test_dot_general_is_laxs():
    a = jax.random.normal(jax.random.key(0), (3, 5, 2, 4))
    b = jax.random.normal(jax.random.key(1), (2, 4, 6))
    for dimensions, right in (
        ((((2, 3), (0, 1)), ((), ())), b),
        ((((3,), (1,)), ((), ())), b),
        ((((3,), (3,)), ((0, 2), (0, 2))), a),
    ):
        ours = mixed_precision.dot_general(a, right, dimensions, dtype=jnp.float32)
        assert jnp.allclose(ours, jax.lax.dot_general(a, right, dimensions), atol=1e-6)
