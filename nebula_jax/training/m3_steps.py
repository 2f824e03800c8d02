"""The optimization steps of M3, and the step of the uncut model (section 3.1, Fig. 4).

Between `generator_step` and `discriminator_step` pass only Tokens. `begin`,
`micro_batch` and `finish` are `generator_step` in pieces, so that each micro-batch of
Fig. 6 can leave as soon as it is made. `whole_step` is the same uncut, one gradient of
eq. 11: the split run must equal it.

B rows of a micro-batch, n of which a generator sends in a step (fan_out; 1), L length,
K generators.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from nebula_jax.training import accumulate, m3, warm_start
from nebula_jax.training import state as train_state


def generator_step(
    config: m3.Config, state: train_state.TrainState, input_ids: jax.Array
) -> tuple[train_state.TrainState, m3.Tokens, m3.Metrics]:
    """Takes one optimization step of a generator, independent of the discriminator.

    Returns the next state, the tokens to send, and metrics; text is [n B, L] int32.
    """
    rngs = m3.keys(state.key())
    batch, weight = m3.mask(config, rngs.mask, input_ids)
    part = m3.generator_loss_of(config, rngs, weight)
    grads, outcome = accumulate.gradients(
        part, state.params, batch, config.fan_out * config.micro_batches
    )
    metrics = m3.generator_metrics(batch, weight, outcome.loss, outcome.sums)
    state, metrics = _updated_generator(config, state, grads, metrics, input_ids)
    return state, outcome.rows, metrics


def _updated_generator(
    config: m3.Config,
    state: train_state.TrainState,
    grads: Any,
    metrics: m3.Metrics,
    input_ids: jax.Array,
) -> tuple[train_state.TrainState, m3.Metrics]:
    words = warm_start.words_seen(input_ids, config.generator.vocab_size)
    optimizer = config.optimizer(config.generator)
    return state.apply_gradients(grads, optimizer, metrics, seen=warm_start.Seen(words))


class Begun(NamedTuple):
    """A step of a generator in progress, micro-batch by micro-batch."""

    rows: Any  # tree of [n, B, ...], masked text
    weight: jax.Array  # [] float32, masked tokens of the whole batch
    grads: Any  # like the parameters, of the micro-batches so far
    loss: jax.Array  # [] float32, likewise
    wrong: jax.Array  # [] float32, samples so far that are not the original


def begin(
    config: m3.Config, state: train_state.TrainState, input_ids: jax.Array
) -> Begun:
    """Begins the step that `generator_step` takes at once; arguments as there."""
    batch, weight = m3.mask(config, m3.keys(state.key()).mask, input_ids)
    return Begun(
        jax.tree.map(lambda leaf: accumulate.split(leaf, config.fan_out), batch),
        weight,
        jax.tree.map(jnp.zeros_like, state.params),
        jnp.zeros(()),
        jnp.zeros(()),
    )


def micro_batch(
    config: m3.Config, state: train_state.TrainState, begun: Begun, number: jax.Array
) -> tuple[Begun, m3.Tokens]:
    """Adds one micro-batch to a step: `number` [] int32, from 0 to n - 1, in order."""
    part = m3.generator_loss_of(config, m3.keys(state.key()), begun.weight)

    def numbered(params: Any, rows: Any, inner: Any) -> accumulate.Outcome:
        if config.fan_out * config.micro_batches == 1:
            return part(params, rows, None)
        # The rows and the number that `generator_step` gives this one of all parts.
        of_all = number if inner is None else number + config.fan_out * inner
        return part(params, rows, of_all)

    rows = jax.tree.map(lambda leaf: leaf[number], begun.rows)
    grads, outcome = accumulate.gradients(
        numbered, state.params, rows, config.micro_batches
    )
    added = begun._replace(
        grads=jax.tree.map(jnp.add, begun.grads, grads),
        loss=begun.loss + outcome.loss,
        wrong=begun.wrong + outcome.sums,
    )
    return added, outcome.rows


def finish(
    config: m3.Config, state: train_state.TrainState, begun: Begun
) -> tuple[train_state.TrainState, m3.Metrics]:
    """Takes the optimization step once all micro-batches are added."""
    metrics = m3.generator_metrics(begun.rows, begun.weight, begun.loss, begun.wrong)
    input_ids, _ = begun.rows
    return _updated_generator(config, state, begun.grads, metrics, input_ids)


def discriminator_step(
    config: m3.Config, state: train_state.TrainState, tokens: Sequence[m3.Tokens]
) -> tuple[train_state.TrainState, m3.Metrics]:
    """Takes one optimization step on the K n Tokens of all generators, joined.

    The first generator's n micro-batches come first, in order, then the next one's.
    """
    joined = join(tokens)
    part, batch, metrics = m3.discriminator_parts(config, state.key(), joined)
    grads, outcome = accumulate.gradients(
        part, state.params, batch, config.micro_batches
    )
    metrics = {"loss": outcome.loss, **outcome.sums, **metrics}
    return _updated_discriminator(config, state, grads, metrics, joined)


def _updated_discriminator(
    config: m3.Config,
    state: train_state.TrainState,
    grads: Any,
    metrics: m3.Metrics,
    tokens: m3.Tokens,
) -> tuple[train_state.TrainState, m3.Metrics]:
    inputs = m3.inputs_of(tokens)
    replaced = ~inputs.is_original & inputs.attention_mask
    kinds = replaced, inputs.is_original & inputs.attention_mask
    seen = warm_start.Seen(
        warm_start.words_seen(inputs.text, config.discriminator.vocab_size),
        jnp.stack([jnp.sum(each).astype(jnp.float32) for each in kinds]),
    )
    optimizer = config.optimizer(config.discriminator)
    return state.apply_gradients(grads, optimizer, metrics, seen=seen)


class Whole(NamedTuple):
    """The result of a step of the uncut model."""

    generators: tuple[train_state.TrainState, ...]  # K, the next ones
    discriminator: train_state.TrainState  # the next one
    tokens: tuple[m3.Tokens, ...]  # K, what a split run would have sent
    of_generators: tuple[m3.Metrics, ...]  # K, their metrics
    of_discriminator: m3.Metrics  # its metrics


def whole_step(
    config: m3.Config,
    generators: Sequence[train_state.TrainState],
    discriminator: train_state.TrainState,
    batches: Sequence[jax.Array],
) -> Whole:
    """Takes one step of all models on K batches [n B, L]: one gradient of eq. 11."""

    def total_loss(params: tuple[Any, Any]) -> tuple[jax.Array, Any]:
        generator_params, discriminator_params = params
        outcomes = [
            m3.generator_loss(config, each, state.key(), batch)
            for each, state, batch in zip(
                generator_params, generators, batches, strict=True
            )
        ]
        tokens = tuple(outcome[1][0] for outcome in outcomes)
        joined = join(_sent(config, tokens))
        loss, metrics = m3.discriminator_loss(
            config, discriminator_params, discriminator.key(), joined
        )
        total = sum(outcome[0] for outcome in outcomes) + loss
        measured = tuple(outcome[1][1] for outcome in outcomes)
        return total, (tokens, joined, measured, metrics)

    params = (tuple(state.params for state in generators), discriminator.params)
    grads, aside = jax.grad(total_loss, has_aux=True)(params)
    tokens, joined, measured, metrics = aside
    after = [
        _updated_generator(config, *each)
        for each in zip(generators, grads[0], measured, batches, strict=True)
    ]
    states, measured = zip(*after, strict=True)
    discriminator, metrics = _updated_discriminator(
        config, discriminator, grads[1], metrics, joined
    )
    return Whole(states, discriminator, tokens, measured, metrics)


def _sent(config: m3.Config, tokens: Sequence[m3.Tokens]) -> list[m3.Tokens]:
    """Returns the n micro-batches of each generator, as they would cross the line."""
    apart = [
        jax.tree.map(lambda leaf: accumulate.split(leaf, config.fan_out), each)
        for each in tokens
    ]
    return [
        jax.tree.map(lambda leaf, i=i: leaf[i], each)
        for each in apart
        for i in range(config.fan_out)
    ]


def join(parts: Sequence[m3.Tokens]) -> m3.Tokens:
    """Joins micro-batches to one batch, to which each gives a row in turn.

    So every device of the cluster holds some of each, and nothing is moved.
    """
    return jax.tree.map(lambda *leaves: accumulate.join(jnp.stack(leaves)), *parts)
