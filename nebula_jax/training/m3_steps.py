"""The optimization steps of M3, and the step of the uncut model (section 3.1, Fig. 4).

Between `generator_step` and `discriminator_step` pass only Tokens. `whole_step` is the
same uncut, one gradient of eq. 11: the split run must equal it.

B batch, L length, K generators.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from nebula_jax.training import accumulate, m3
from nebula_jax.training import state as train_state


def generator_step(
    config: m3.Config, state: train_state.TrainState, input_ids: jax.Array
) -> tuple[train_state.TrainState, m3.Tokens, m3.Metrics]:
    """Takes one optimization step of a generator, independent of the discriminator.

    Args:
      config: of the run.
      state: of this generator.
      input_ids: [B, L] int32, its own text.

    Returns:
      The next state, the tokens to send, and metrics.
    """
    part, batch, weight = m3.generator_parts(config, state.key(), input_ids)
    grads, outcome = accumulate.gradients(
        part, state.params, batch, config.micro_batches
    )
    metrics = m3.generator_metrics(input_ids, outcome, weight)
    state, metrics = state.apply_gradients(grads, config.optimizer, metrics)
    return state, outcome.rows, metrics


def discriminator_step(
    config: m3.Config, state: train_state.TrainState, tokens: Sequence[m3.Tokens]
) -> tuple[train_state.TrainState, m3.Metrics]:
    """Takes one optimization step on the concatenation of the generators' batches.

    Args:
      config: of the run.
      state: of the discriminator.
      tokens: K Tokens, one from each generator, in order.

    Returns:
      The next state and metrics.
    """
    part, batch, metrics = m3.discriminator_parts(
        config, state.key(), _concatenate(tokens)
    )
    grads, outcome = accumulate.gradients(
        part, state.params, batch, config.micro_batches
    )
    metrics = {"loss": outcome.loss, **outcome.sums, **metrics}
    return state.apply_gradients(grads, config.optimizer, metrics)


def whole_step(
    config: m3.Config,
    generators: Sequence[train_state.TrainState],
    discriminator: train_state.TrainState,
    batches: Sequence[jax.Array],
) -> tuple[
    tuple[train_state.TrainState, ...],
    train_state.TrainState,
    tuple[m3.Tokens, ...],
    tuple[m3.Metrics, ...],
    m3.Metrics,
]:
    """Takes one step of all models: a single gradient of eq. 11 in all parameters.

    Args:
      config: of the run.
      generators: K states.
      discriminator: its state.
      batches: K arrays [B, L] int32.

    Returns:
      The next states, the tokens that a split run would have sent, and metrics.
    """

    def total_loss(params: tuple[Any, Any]) -> tuple[jax.Array, Any]:
        generator_params, discriminator_params = params
        outcomes = [
            m3.generator_loss(config, each, state.key(), batch)
            for each, state, batch in zip(
                generator_params, generators, batches, strict=True
            )
        ]
        tokens = tuple(outcome[1][0] for outcome in outcomes)
        loss, metrics = m3.discriminator_loss(
            config, discriminator_params, discriminator.key(), _concatenate(tokens)
        )
        total = sum(outcome[0] for outcome in outcomes) + loss
        return total, (tokens, tuple(outcome[1][1] for outcome in outcomes), metrics)

    params = (tuple(state.params for state in generators), discriminator.params)
    grads, (tokens, generator_metrics, metrics) = jax.grad(total_loss, has_aux=True)(
        params
    )
    *after, (discriminator, metrics) = (
        state.apply_gradients(each, config.optimizer, measured)
        for state, each, measured in zip(
            (*generators, discriminator),
            (*grads[0], grads[1]),
            (*generator_metrics, metrics),
            strict=True,
        )
    )
    states, generator_metrics = zip(*after, strict=True)
    return states, discriminator, tokens, generator_metrics, metrics


def _concatenate(tokens: Sequence[m3.Tokens]) -> m3.Tokens:
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *tokens)
