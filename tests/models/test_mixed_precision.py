import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nebula_jax.models import mixed_precision

SHAPES = [
    ("bld,dhk->blhk", (3, 5, 8), (8, 2, 4)),
    ("bmd,vd->bmv", (1, 7, 8), (11, 8)),
    ("bqhk,bmhk->bhqm", (3, 5, 2, 4), (3, 6, 2, 4)),
]


@pytest.mark.parametrize(("subscripts", "left", "right"), SHAPES)
def test_bfloat16_rounds_operands_and_nothing_else(subscripts, left, right):
    # Small integers are exact in bfloat16, and so are their sums here in float32.
    random = np.random.RandomState(0)
    a, b = (random.randint(-4, 5, each).astype(np.float32) for each in (left, right))

    def pull(product):
        @jax.jit
        def both(a, b):
            value, back = jax.vjp(product, a, b)
            return value, back(jnp.round(value))

        return both(a, b)

    ours = pull(lambda a, b: mixed_precision.einsum(subscripts, a, b, jnp.bfloat16))
    theirs = pull(lambda a, b: jnp.einsum(subscripts, a, b))
    assert np.array_equal(ours[0], theirs[0])
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(ours))
    for mine, other in zip(ours[1], theirs[1], strict=True):
        # The gradient itself is rounded: 8 bits of 256 are enough for most of it.
        assert np.allclose(mine, other, rtol=0.02, atol=0.02 * np.abs(other).max())


def test_dot_general_is_laxs():
    random = np.random.RandomState(0)
    a = random.randn(3, 5, 2, 4).astype(np.float32)
    b = random.randn(2, 4, 6).astype(np.float32)
    for dimensions, right in (
        ((((2, 3), (0, 1)), ((), ())), b),
        ((((3,), (1,)), ((), ())), b),
        ((((3,), (3,)), ((0, 2), (0, 2))), a),
    ):
        ours = mixed_precision.dot_general(a, right, dimensions, dtype=jnp.float32)
        assert np.allclose(ours, jax.lax.dot_general(a, right, dimensions), atol=1e-6)
