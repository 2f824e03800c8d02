"""Loss functions (eq. 6, 8, 10; section 4.2). Each returns a weighted sum, never a
mean, so that micro-batches, replicas and clusters can be added before dividing.

B batch, L length, V vocabulary, M masked positions.
"""

import jax
import jax.numpy as jnp
import optax


def masked_cross_entropy(
    logits: jax.Array, labels: jax.Array, weights: jax.Array
) -> jax.Array:
    """Computes -Σ_{i∈M} log p(x_i), [] float32: eq. 6, and eq. 10 of the discriminator.

    Eq. 10 is printed without its minus sign and logarithm; COCO-LM, which it
    simplifies, has both. Logits are [B, M, V] float32, labels [B, M] int32, the
    original tokens; weights [B, M] float32, 0 in empty slots.
    """
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.sum(losses * weights)


def replaced_token_detection(
    logits: jax.Array, is_original: jax.Array, weights: jax.Array
) -> jax.Array:
    """Computes eq. 8, [] float32, cross-entropy of D(x^corrupt, i) = p(i is original).

    Logits [B, L] float32 are log-odds that the token is original; `is_original` is
    [B, L] bool; weights [B, L] float32 are 0 at padding.
    """
    losses = optax.sigmoid_binary_cross_entropy(logits, is_original)
    return jnp.sum(losses * weights)


def label_smoothed_cross_entropy(
    logits: jax.Array, labels: jax.Array, weights: jax.Array, smoothing: float
) -> jax.Array:
    """Computes Σ (1-ε) (-log p(label)) + ε/V Σ_v -log p(v); ε = 0 is cross-entropy.

    Log-probabilities of all V are never in memory: log p(v) is a logit minus one
    number, so their sum follows from the logits' mean. Logits are [..., V] float32,
    finite; labels [...] int32; weights [...] float32, 0 where nothing is predicted; ε
    is 0.1 in section 4.2 (printed as 1). Returns [] float32.
    """
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    of_label = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    smooth = (1 - smoothing) * of_label + smoothing * jnp.mean(logits, axis=-1)
    return jnp.sum((normalizer - smooth) * weights)


def mean(total: jax.Array, weight: jax.Array) -> jax.Array:
    """Divides a sum by its weight; 0 if the weight is 0."""
    return total / jnp.maximum(weight, 1.0)
