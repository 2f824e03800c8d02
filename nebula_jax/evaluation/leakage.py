"""Leakage: the text that a receiver can recover, by attacks and their scores.

ABNet sends hidden states. A receiver has the weights of public models, and text of its
own in the same language. These are simple attacks, so their figures are lower bounds:
more effort recovers more, and nothing here shows that something cannot be recovered.

N attacked vectors, M of the attacker's own, D width, E width of the embeddings (D, save
in ELECTRA), V pieces to choose among, G guesses, L length, F features, T targets.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

GUESSES = 5
# Our choice, for two cores: four times as many steps recover up to 5 points more.
STEPS, BATCH, RATE = 200, 256, 2e-3
PENALTY = 1e-3
"""The ridge's λ over the mean square of a feature."""
SHARPNESS = 10.0  # the logit of a piece whose embedding is met exactly
TINY = 1e-12


class Recovery(NamedTuple):
    """The shares of attacked tokens that are recovered.

    first: those whose piece is the first guess.
    among: those whose piece is among the GUESSES best.
    """

    first: float
    among: float


def recovery(guesses: np.ndarray, labels: np.ndarray) -> Recovery:
    """Compares guesses [N, G], the best first, with the pieces [N] that they are of."""
    hits = np.asarray(guesses) == labels[:, None]
    return Recovery(float(hits[:, 0].mean()), float(hits.any(axis=1).mean()))


def chance(own: np.ndarray, labels: np.ndarray, size: int) -> tuple[Recovery, float]:
    """Scores guesses by the attacker's own text alone, which see nothing that crosses.

    Args:
      own: [M] int, pieces of the attacker's own text.
      labels: [N] int, the attacked ones.
      size: V.

    Returns:
      The score of always naming the most frequent pieces, and the share that is right
      of pieces that are drawn as often as they occur.
    """
    counts = np.bincount(own, minlength=size)
    best = np.argsort(-counts, kind="stable")[:GUESSES]
    guesses = np.broadcast_to(best, (len(labels), len(best)))
    unigram = (counts / max(1, int(counts.sum())))[labels].mean()
    return recovery(guesses, labels), float(unigram)


@jax.jit
def nearest(vectors: jax.Array, table: jax.Array) -> jax.Array:
    """Ranks pieces by the cosine of their embedding with each vector.

    It takes no training: weights of a pretrained model are public, and a Transformer's
    residuals carry a token's own embedding through its layers.

    Args:
      vectors: [N, D] float32, hidden states as they were received.
      table: [V, D] float32, the model's output before its first layer for each piece,
        at the position of these vectors.

    Returns:
      [N, G] int32, the best first.
    """
    return _best(_unit(vectors) @ _unit(table).T)


class Inverter(NamedTuple):
    """A trained map from a hidden state to the log-odds of pieces.

    With x the standardized hidden state: (x A + relu(x B) C) e_v + b_v, for the
    direction e_v of each piece's embedding.

    mean, deviation: [1, D] float32, of the hidden states that it was trained on.
    linear: [D, E] float32, A.
    inner: [D, D] float32, B.
    outer: [D, E] float32, C.
    bias: [V] float32, b.
    """

    mean: jax.Array
    deviation: jax.Array
    linear: jax.Array
    inner: jax.Array
    outer: jax.Array
    bias: jax.Array


@functools.partial(jax.jit, static_argnames="steps")
def fit_inverter(
    hidden: jax.Array,
    labels: jax.Array,
    table: jax.Array,
    key: jax.Array,
    steps: int = STEPS,
) -> Inverter:
    """Trains an inverter on the attacker's own text.

    It begins with the ridge regression of the embeddings' directions on the hidden
    states, and goes on with Adam on the cross-entropy.

    Args:
      hidden: [M, D] float32, of its own text, through the codec that is attacked.
      labels: [M] int32, their pieces.
      table: [V, E] float32, public embeddings of all pieces.
      key: of the initialization and of the order.
      steps: of Adam, each of BATCH tokens; its rate falls from RATE as a cosine.
    """
    draw, order = jax.random.split(key)
    mean = jnp.mean(hidden, axis=0, keepdims=True)
    deviation = jnp.std(hidden, axis=0, keepdims=True)
    deviation = jnp.maximum(deviation, 1e-6 * jnp.max(deviation) + TINY)
    targets = _directions(table)
    counts = jnp.zeros(len(table)).at[labels].add(1.0)
    width = hidden.shape[-1]
    fresh = Inverter(
        mean,
        deviation,
        ridge((hidden - mean) / deviation, targets[labels], PENALTY),
        jax.random.normal(draw, (width, width)) * (2 / width) ** 0.5,
        jnp.zeros((width, table.shape[-1])),
        jnp.log((counts + 0.5) / len(labels)),  # half an occurrence of what has none
    )
    optimizer = optax.adam(optax.cosine_decay_schedule(RATE, steps))
    begin = fresh.linear, fresh.inner, fresh.outer, fresh.bias

    def of(weights: tuple[jax.Array, ...]) -> Inverter:
        return Inverter(mean, deviation, *weights)

    def loss(weights: tuple[jax.Array, ...], places: jax.Array) -> jax.Array:
        logits = _log_odds(of(weights), hidden[places], targets)
        of_each = optax.softmax_cross_entropy_with_integer_labels(
            logits, labels[places]
        )
        return jnp.mean(of_each)

    def step(carry: tuple, places: jax.Array) -> tuple[tuple, None]:
        weights, moments = carry
        updates, moments = optimizer.update(jax.grad(loss)(weights, places), moments)
        return (optax.apply_updates(weights, updates), moments), None

    drawn = jax.random.randint(order, (steps, BATCH), 0, len(labels))
    (weights, _), _ = jax.lax.scan(step, (begin, optimizer.init(begin)), drawn)
    return of(weights)


@jax.jit
def invert(inverter: Inverter, hidden: jax.Array, table: jax.Array) -> jax.Array:
    """Ranks pieces for attacked hidden states.

    Args:
      hidden: [N, D] float32, as they were received.
      table: [V, E] float32, as it was trained with.

    Returns:
      [N, G] int32, the best first.
    """
    return _best(_log_odds(inverter, hidden, _directions(table)))


def _log_odds(
    inverter: Inverter, hidden: jax.Array, directions: jax.Array
) -> jax.Array:
    standard = (hidden - inverter.mean) / inverter.deviation
    embedded = standard @ inverter.linear
    embedded += jax.nn.relu(standard @ inverter.inner) @ inverter.outer
    return embedded @ directions.T + inverter.bias[None]


def _directions(table: jax.Array) -> jax.Array:
    """Returns each embedding's direction from their mean, of one length: [V, E]."""
    centered = table - jnp.mean(table, axis=0, keepdims=True)
    return SHARPNESS**0.5 * _unit(centered)


def _unit(vectors: jax.Array) -> jax.Array:
    norms = jnp.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / jnp.maximum(norms, TINY)


def _best(scores: jax.Array) -> jax.Array:
    return jax.lax.top_k(scores, min(GUESSES, scores.shape[-1]))[1]


def ridge(features: jax.Array, targets: jax.Array, penalty: float) -> jax.Array:
    """Solves min |X W - Y|² + λ |W|².

    Args:
      features: [M, F] float32, X.
      targets: [M, T] float32, Y.
      penalty: λ over M times the mean square of X.

    Returns:
      W [F, T] float32.
    """
    gram = features.T @ features
    shift = penalty * len(features) * jnp.mean(features**2) + TINY
    shifted = gram + shift * jnp.eye(len(gram))
    return jax.scipy.linalg.solve(shifted, features.T @ targets, assume_a="pos")
