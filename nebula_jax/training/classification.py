"""Fine-tuning of a classifier: a step and its predictions, both pure.

B batch, L length, C classes.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from nebula_jax.models import classifier
from nebula_jax.training import losses, partition
from nebula_jax.training import state as train_state


def is_trained(path: str) -> bool:
    """Returns True for all parameters but the embeddings, where those are frozen."""
    return not path.startswith("embeddings/")


def step(
    config: classifier.Config,
    optimizer: optax.GradientTransformation,
    state: train_state.TrainState,
    frozen: Any,
    input_ids: jax.Array,
    labels: jax.Array,
) -> tuple[train_state.TrainState, dict[str, jax.Array]]:
    """Takes one optimization step.

    Args:
      config: of the classifier.
      optimizer: of the trained parameters.
      state: of the trained parameters.
      frozen: the other parameters, from `partition.split`.
      input_ids: [B, L] int32, padded.
      labels: [B] int32.

    Returns:
      The next state, and scalars: loss (mean over the batch), accuracy, tokens,
      is_finite.
    """
    rng = state.key()

    def loss_of(trained: Any) -> tuple[jax.Array, jax.Array]:
        params = partition.merge(trained, frozen)
        found = classifier.logits(config, params, input_ids, rng)
        weights = jnp.ones(labels.shape, jnp.float32)
        return losses.mean(losses.masked_cross_entropy(found, labels, weights)), found

    (loss, found), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
    metrics = {
        "loss": loss,
        "accuracy": jnp.mean(jnp.argmax(found, axis=-1) == labels),
        "tokens": jnp.sum(input_ids != config.special.pad),
    }
    return state.apply_gradients(grads, optimizer, metrics)


def predict(config: classifier.Config, params: Any, input_ids: jax.Array) -> jax.Array:
    """Computes class probabilities: input_ids [B, L] int32 -> [B, C] float32."""
    return jax.nn.softmax(classifier.logits(config, params, input_ids))
