"""Fine-tuning of a classifier: a step and its predictions, both pure.

B batch, L length, C classes.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from nebula_jax.models import classifier
from nebula_jax.training import accumulate, losses, partition
from nebula_jax.training import state as train_state


def is_trained(path: str) -> bool:
    """Returns True for the paths of all parameters but the embeddings."""
    return not path.startswith("embeddings/")


def step(
    config: classifier.Config,
    optimizer: optax.GradientTransformation,
    micro_batches: int,
    state: train_state.TrainState,
    frozen: Any,
    input_ids: jax.Array,
    labels: jax.Array,
) -> tuple[train_state.TrainState, dict[str, jax.Array]]:
    """Takes one optimization step on padded text [B, L] int32 with labels [B] int32.

    Gradients of the micro-batches are added up. Returns the next state; scalars: loss
    (mean of the batch), accuracy, tokens, is_finite.
    """
    rng, weight = state.key(), jnp.asarray(len(labels), jnp.float32)

    def part(trained: Any, rows: Any, number: jax.Array | None) -> accumulate.Outcome:
        input_ids, labels = rows
        params = partition.merge(trained, frozen)
        key = accumulate.key(rng, number)
        found = classifier.logits(config, params, input_ids, key)
        weights = jnp.ones(labels.shape, jnp.float32)
        entropy = losses.masked_cross_entropy(found, labels, weights)
        correct = jnp.argmax(found, axis=-1) == labels
        return accumulate.Outcome(losses.mean(entropy, weight), (), correct)

    grads, outcome = accumulate.gradients(
        part, state.params, (input_ids, labels), micro_batches
    )
    metrics = {
        "loss": outcome.loss,
        "accuracy": jnp.mean(outcome.rows),
        "tokens": jnp.sum(input_ids != config.special.pad),
    }
    return state.apply_gradients(grads, optimizer, metrics)


def predict(config: classifier.Config, params: Any, input_ids: jax.Array) -> jax.Array:
    """Computes class probabilities: input_ids [B, L] int32 -> [B, C] float32."""
    return jax.nn.softmax(classifier.logits(config, params, input_ids))
