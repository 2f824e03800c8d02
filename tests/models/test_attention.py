import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nebula_jax.models import transformer

B, Q, M, H, K = 3, 5, 7, 2, 4
RANDOM = np.random.RandomState(0)
QUERY, KEY, VALUE = (
    RANDOM.randn(B, length, H, K).astype(np.float32) for length in (Q, M, M)
)
CONFIG = transformer.Config(8, 1, H * K, H, 8, M)
MASKS = {
    "of each query": RANDOM.rand(B, Q, M) < 0.5,
    "of each row": RANDOM.rand(B, 1, M) < 0.5,
    "of all": RANDOM.rand(1, Q, M) < 0.5,
}
for _mask in MASKS.values():
    _mask[..., 0] = True  # numpy's softmax of nothing is not a number


def by_hand(mask):
    """The oracle: query by query, head by head."""
    mask = np.broadcast_to(mask, (B, Q, M))
    out = np.zeros((B, Q, H, K))
    for b, q, h in np.ndindex(B, Q, H):
        allowed = mask[b, q]
        scores = KEY[b, allowed, h] @ QUERY[b, q, h] / np.sqrt(K)
        shares = np.exp(scores - scores.max())
        out[b, q, h] = shares / shares.sum() @ VALUE[b, allowed, h]
    return out


def applied(mask, dtype="float32"):
    """The output, and the gradient of the sum of its squares."""

    config = dataclasses.replace(CONFIG, dtype=dtype)

    def loss(query, *memory):
        memory = transformer.KeyValues(*memory)
        out = transformer.attend(query, memory, mask, config, lambda shares: shares)
        return jnp.sum(out**2), out

    gradient = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)
    return jax.device_get(jax.jit(gradient)(QUERY, KEY, VALUE))


@pytest.mark.parametrize("mask", MASKS)
def test_attention_is_the_one_by_hand(mask):
    _, out = applied(MASKS[mask])
    np.testing.assert_allclose(out, by_hand(MASKS[mask]), atol=1e-6)
    assert out.dtype == np.float32


def test_operands_of_two_bytes_round_and_no_more():
    """Shares, values and gradients have 8 bits each, and a few are multiplied."""
    mask = MASKS["of each row"]
    (grads, out), (exact, precise) = (
        applied(mask, dtype) for dtype in ("bfloat16", "float32")
    )
    np.testing.assert_allclose(out, precise, atol=4 * 2**-8)
    assert (out != precise).any()
    for a, b in zip(grads, exact, strict=True):
        np.testing.assert_allclose(a, b, atol=8 * 2**-8 * np.abs(b).max())


def test_a_row_of_padding_is_finite():
    grads, out = applied(np.zeros((B, 1, M), bool))
    assert all(np.isfinite(leaf).all() for leaf in (*grads, out))
