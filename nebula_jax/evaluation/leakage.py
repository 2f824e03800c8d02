"""Leakage: the text that a receiver can recover from hidden states, by two attacks.

ABNet sends hidden states. A receiver has the weights of public models, and text of its
own in the same language. The attacks are simple, so their figures are lower bounds:
more effort recovers more, and nothing here shows that something cannot be recovered.

N attacked vectors, M of the attacker's own, D width, E width of the embeddings (D, save
in ELECTRA), V pieces to choose among, F features, T targets.
"""

import functools

import jax
import jax.numpy as jnp
import optax

# Our choice, for two cores: four times as many steps recover up to 5 points more.
STEPS, BATCH, RATE = 200, 256, 2e-3
PENALTY = 1e-3  # the ridge's λ over the mean square of a feature
SHARPNESS = 10.0  # the logit of a piece whose embedding is met exactly
TINY = 1e-12


@jax.jit
def nearest(vectors: jax.Array, table: jax.Array) -> jax.Array:
    """Names the piece whose embedding has the largest cosine with each vector.

    It takes no training: weights of a pretrained model are public, and a Transformer's
    residuals carry a token's own embedding through its layers. Returns [N] int32.

    Args:
      vectors: [N, D] float32, hidden states as they were received.
      table: [V, D] float32, the model's output before its first layer for each piece,
        at the position of these vectors.
    """
    return jnp.argmax(_unit(vectors) @ _unit(table).T, axis=-1)


@functools.partial(jax.jit, static_argnames="steps")
def inverted(
    attacked: jax.Array,
    own: jax.Array,
    labels: jax.Array,
    table: jax.Array,
    key: jax.Array,
    steps: int = STEPS,
) -> jax.Array:
    """Names pieces by an inverter that the attacker trains on text of its own.

    With x the standardized hidden state, the log-odds of a piece are
    (x A + relu(x B) C) e + b, for the direction e of its embedding. Training begins
    with the ridge regression of directions on hidden states, and goes on with Adam on
    the cross-entropy, whose rate falls from RATE as a cosine. Returns [N] int32.

    Args:
      attacked: [N, D] float32, hidden states as they were received.
      own: [M, D] float32, of its own text, through the codec that is attacked.
      labels: [M] int32, the pieces of `own`.
      table: [V, E] float32, public embeddings of all pieces.
      key: of the initialization and of the order.
      steps: of Adam, each of BATCH tokens.
    """
    draw, order = jax.random.split(key)
    mean = jnp.mean(own, axis=0, keepdims=True)
    deviation = jnp.std(own, axis=0, keepdims=True)
    deviation = jnp.maximum(deviation, 1e-6 * jnp.max(deviation) + TINY)
    own, attacked = ((each - mean) / deviation for each in (own, attacked))
    centered = table - jnp.mean(table, axis=0, keepdims=True)
    directions = SHARPNESS**0.5 * _unit(centered)
    counts, width = jnp.zeros(len(table)).at[labels].add(1.0), own.shape[-1]
    begin = (
        ridge(own, directions[labels], PENALTY),
        jax.random.normal(draw, (width, width)) * (2 / width) ** 0.5,
        jnp.zeros((width, table.shape[-1])),
        jnp.log((counts + 0.5) / len(labels)),  # half an occurrence of what has none
    )
    optimizer = optax.adam(optax.cosine_decay_schedule(RATE, steps))

    def log_odds(weights: tuple[jax.Array, ...], x: jax.Array) -> jax.Array:
        linear, inner, outer, bias = weights
        embedded = x @ linear + jax.nn.relu(x @ inner) @ outer
        return embedded @ directions.T + bias[None]

    def loss(weights: tuple[jax.Array, ...], places: jax.Array) -> jax.Array:
        logits, right = log_odds(weights, own[places]), labels[places]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, right)
        return jnp.mean(losses)

    def step(carry: tuple, places: jax.Array) -> tuple[tuple, None]:
        weights, moments = carry
        updates, moments = optimizer.update(jax.grad(loss)(weights, places), moments)
        return (optax.apply_updates(weights, updates), moments), None

    drawn = jax.random.randint(order, (steps, BATCH), 0, len(labels))
    (weights, _), _ = jax.lax.scan(step, (begin, optimizer.init(begin)), drawn)
    return jnp.argmax(log_odds(weights, attacked), axis=-1)


def _unit(vectors: jax.Array) -> jax.Array:
    norms = jnp.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / jnp.maximum(norms, TINY)


def ridge(features: jax.Array, targets: jax.Array, penalty: float) -> jax.Array:
    """Solves min |X W - Y|² + λ |W|² for W [F, T] float32.

    Of X [M, F] and Y [M, T] float32; `penalty` is λ over M times the mean square of X.
    """
    gram = features.T @ features
    shift = penalty * len(features) * jnp.mean(features**2) + TINY
    shifted = gram + shift * jnp.eye(len(gram))
    return jax.scipy.linalg.solve(shifted, features.T @ targets, assume_a="pos")
