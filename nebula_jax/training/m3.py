"""Scenario I, M3: K generators, each with its own text, and one discriminator.

Section 3.1, Fig. 4: models, losses and predictions; the steps are in `m3_steps`.
Between a generator and the discriminator pass only Tokens.

B batch, L length, V vocabulary, M mask capacity (see `training.masking`), K generators.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.models import mask_slots, masked_lm, transformer
from nebula_jax.training import accumulate, losses, masking, optimizers, warm_start
from nebula_jax.training import state as train_state


@dataclasses.dataclass(frozen=True)
class Config:
    """The settings that determine M3's arithmetic, apart from data and seed."""

    generator: transformer.Config
    discriminator: transformer.Config
    steps: int  # optimization steps; the learning rate falls to 0 after the last
    mask_rate: float = 0.15  # share of tokens that are masked
    mask_policy: str = "electra"  # a name in masking.POLICIES
    temperature: float = 1.0  # of generators' samples; above 1, fakes convince less
    rtd_weight: float = 50.0  # λ of eq. 9 and 11
    clm_weight: float = 1.0  # γ of eq. 11
    learning_rate: float = 1e-4  # peak, section 4.1
    warmup_steps: int = 10_000  # section 4.1
    weight_decay: float = 0.0  # decoupled; the paper names none
    micro_batches: int = 1  # parts of a batch whose gradients are added up
    fan_out: int = 1  # n, micro-batches of a generator, each sent as soon as it is made
    clip_norm: float = 1.0  # of each model's gradient, ELECTRA's; the paper names none
    start: warm_start.Config = warm_start.NONE  # the protection of pretrained encoders

    @property
    def capacity(self) -> int:
        """The mask slots of a row, M."""
        return masking.capacity(self.mask_rate, self.generator.max_length)

    def optimizer(
        self, encoder: transformer.Config
    ) -> optax.GradientTransformationExtraArgs:
        """Makes the optimizer of a model: Adam with linear decay."""
        schedule = optimizers.linear_decay(
            self.learning_rate, self.warmup_steps, self.steps
        )
        if self.start == warm_start.NONE:
            adam = optimizers.adam(
                schedule, weight_decay=self.weight_decay, clip_norm=self.clip_norm
            )
            return optax.with_extra_args_support(adam)
        return warm_start.optimizer(
            self.start,
            optimizers.adam(lambda _: 1.0, weight_decay=self.weight_decay),
            peak=self.learning_rate,
            warmup_steps=self.warmup_steps,
            steps=self.steps,
            layers=encoder.layers,
            clip_norm=self.clip_norm,
        )


class Tokens(NamedTuple):
    """The message from a generator to the discriminator: token ids only."""

    input_ids: jax.Array  # [B, L] int32, x^corrupt of eq. 7
    masked: jax.Array  # [B, L] bool, the positions in M, whose tokens were sampled
    originals: jax.Array  # [B, M] int32, the true tokens there; 0 in empty slots


Metrics = dict[str, jax.Array]


def tokens_spec(config: Config, batch_size: int) -> Tokens:
    """Returns the shapes and dtypes of a generator's Tokens, for the bridge."""
    shape = (batch_size, config.generator.max_length)
    return Tokens._make(
        [
            jax.ShapeDtypeStruct(shape, jnp.int32),
            jax.ShapeDtypeStruct(shape, jnp.bool_),
            jax.ShapeDtypeStruct((batch_size, config.capacity), jnp.int32),
        ]
    )


def init_generator(
    config: Config, seed: int, index: int, encoder: Any = None
) -> train_state.TrainState:
    """Initializes generator `index` (0 to K-1); each draws another head.

    `encoder` has a pretrained model's `embeddings` and `encoder` (section 4.1), if any.
    """
    rng = jax.random.fold_in(jax.random.key(seed), 1 + index)
    module = masked_lm.MaskedLM(config.generator)
    return _init(module, config, config.generator, rng, encoder)


def init_discriminator(
    config: Config, seed: int, encoder: Any = None
) -> train_state.TrainState:
    """Initializes the discriminator; arguments as for `init_generator`."""
    rng = jax.random.fold_in(jax.random.key(seed), 0)
    module = masked_lm.Discriminator(config.discriminator)
    return _init(module, config, config.discriminator, rng, encoder)


def _init(
    module: nn.Module,
    config: Config,
    shape: transformer.Config,
    rng: jax.Array,
    encoder: Any,
) -> train_state.TrainState:
    init_rng, step_rng = jax.random.split(rng)
    ids = jnp.zeros((1, config.generator.max_length), jnp.int32)
    slots = jnp.zeros((1, config.capacity), jnp.int32)

    def init() -> Any:
        return module.init(init_rng, ids, ids == 0, slots)["params"]

    params = init() if encoder is None else warm_start.completed(init, encoder)
    return train_state.create(params, config.optimizer(shape), step_rng)


class Keys(NamedTuple):
    """The keys of a generator's step, one for each thing that it draws."""

    mask: jax.Array
    sample: jax.Array
    dropout: jax.Array


def keys(rng: jax.Array) -> Keys:
    """Derives the keys of a generator's step from the key of that step."""
    return Keys(*jax.random.split(rng, 3))


def mask(config: Config, rng: jax.Array, input_ids: jax.Array) -> tuple[Any, jax.Array]:
    """Masks text [B, L] int32 as the first thing of a step, with its key `mask`.

    Returns what `generator_loss_of` takes rows of; count of masked tokens, [] float32.
    """
    masked = masking.mask_tokens(
        rng,
        input_ids,
        rate=config.mask_rate,
        policy=masking.POLICIES[config.mask_policy],
        vocab_size=config.generator.vocab_size,
    )
    weight = jnp.sum((masked.positions < input_ids.shape[-1]).astype(jnp.float32))
    return (input_ids, masked), weight


def generator_loss_of(
    config: Config, rngs: Keys, weight: jax.Array, training: bool = True
) -> accumulate.Loss:
    """Returns eq. 6 of a micro-batch, and the samples of eq. 7 from the same logits.

    With the loss of rows that `mask` made, how many samples are wrong, and the Tokens.
    `weight` [] float32 are masked tokens of the whole batch; `training` has dropout:
    ELECTRA too samples from the training-mode logits.
    """

    def part(params: Any, rows: Any, number: jax.Array | None) -> accumulate.Outcome:
        input_ids, masked = rows
        length = input_ids.shape[-1]
        logits = masked_lm.MaskedLM(config.generator).apply(
            {"params": warm_start.without_frozen(config.start, params)},
            masked.input_ids,
            input_ids != vocabularies.SPECIAL.pad,
            masked.positions,
            not training,
            rngs={"dropout": accumulate.key(rngs.dropout, number)},
        )
        filled = (masked.positions < length).astype(jnp.float32)
        entropy = losses.masked_cross_entropy(logits, masked.originals, filled)
        # Nothing flows back through the sample.
        scores = jax.lax.stop_gradient(logits) / config.temperature
        sampled = categorical(accumulate.key(rngs.sample, number), scores)
        tokens = Tokens(
            mask_slots.scatter(input_ids, masked.positions, sampled),
            mask_slots.mark(masked.positions, length),
            masked.originals,
        )
        wrong = jnp.sum((sampled != masked.originals) * filled)
        return accumulate.Outcome(losses.mean(entropy, weight), wrong, tokens)

    return part


def categorical(rng: jax.Array, logits: jax.Array) -> jax.Array:
    """Draws a sample of softmax(logits) per row; returns [...] int32, in [0, V).

    `jax.random.categorical` draws a number for every piece and takes two logarithms of
    it: on a CPU a sixth of a generator's step. Here one number selects a block of about
    sqrt(V) pieces by their cumulative distribution, and another one a piece of it.
    Probabilities are exact to 2^-23 of the whole and of the block. Logits [..., V] are
    finite or -inf, which is never drawn; not all of a row -inf.
    """
    logits = logits.astype(jnp.float32)
    size = logits.shape[-1]
    block = math.isqrt(size - 1) + 1
    count = -(-size // block)
    weights = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    padding = [(0, 0)] * (logits.ndim - 1) + [(0, count * block - size)]
    weights = jnp.pad(weights, padding).reshape(*logits.shape[:-1], count, block)
    which_rng, inside_rng = jax.random.split(rng)
    which = _draw(which_rng, jnp.sum(weights, axis=-1))
    inside = jnp.take_along_axis(weights, which[..., None, None], axis=-2)[..., 0, :]
    return which * block + _draw(inside_rng, inside)


def _draw(rng: jax.Array, weights: jax.Array) -> jax.Array:
    """Draws indices in proportion to weights [..., N], at least 0 -> [...] int32."""
    is_possible = weights > 0
    cumulative = jnp.where(is_possible, jnp.cumsum(weights, axis=-1), 0.0)
    # A uniform number is at most 1 - 2^-23, so that this is less than the maximum.
    value = jax.random.uniform(rng, weights.shape[:-1]) * jnp.max(cumulative, axis=-1)
    return jnp.argmax(cumulative > value[..., None], axis=-1).astype(jnp.int32)


def generator_metrics(
    batch: Any, weight: jax.Array, loss: jax.Array, wrong: jax.Array
) -> Metrics:
    """Returns the metrics of a batch, from what `mask` and `generator_loss_of` gave."""
    input_ids, _ = batch
    return {
        "loss": loss,
        "sampled_mlm_accuracy": 1 - losses.mean(wrong, weight),
        "tokens": jnp.sum(input_ids != vocabularies.SPECIAL.pad),
    }


def generator_loss(
    config: Config,
    params: Any,
    rng: jax.Array,
    input_ids: jax.Array,
    training: bool = True,
) -> tuple[jax.Array, tuple[Tokens, Metrics]]:
    """Computes eq. 6, [] float32, and samples the corruption of eq. 7 from its logits.

    Returns with the loss (tokens to send, metrics); `config`, `input_ids`: of `mask`.
    """
    rngs = keys(rng)
    batch, weight = mask(config, rngs.mask, input_ids)
    part = generator_loss_of(config, rngs, weight, training)
    micro_batches = config.fan_out * config.micro_batches if training else 1
    outcome = accumulate.total(part, params, batch, micro_batches)
    metrics = generator_metrics(batch, weight, outcome.loss, outcome.sums)
    return outcome.loss, (outcome.rows, metrics)


class Inputs(NamedTuple):
    """The discriminator's inputs and labels, derived from Tokens."""

    text: jax.Array  # [B, L] int32, the tokens before any was replaced
    attention_mask: jax.Array  # [B, L] bool
    positions: jax.Array  # [B, M] int32, of masked tokens; L in empty slots
    filled: jax.Array  # [B, M] float32, 1 in slots that are not empty
    is_original: jax.Array  # [B, L] bool


def inputs_of(tokens: Tokens) -> Inputs:
    """Derives the discriminator's inputs and labels from the tokens sent."""
    length = tokens.input_ids.shape[-1]
    positions = mask_slots.find(tokens.masked, tokens.originals.shape[-1])
    text = mask_slots.scatter(tokens.input_ids, positions, tokens.originals)
    return Inputs(
        text=text,
        # A generator may sample [PAD] itself: a masked position is never padding.
        attention_mask=(tokens.input_ids != vocabularies.SPECIAL.pad) | tokens.masked,
        positions=positions,
        filled=(positions < length).astype(jnp.float32),
        is_original=tokens.input_ids == text,  # a sampled gold token counts as such
    )


def discriminator_parts(
    config: Config, rng: jax.Array, tokens: Tokens
) -> tuple[accumulate.Loss, Any, Metrics]:
    """Prepares λ L_D + γ L_CLM of eq. 11: eq. 8 over all tokens, eq. 10 over masked.

    Returns the loss of a micro-batch, with its parts; the batch that it is of; metrics
    that no model is needed for.
    """
    inputs = inputs_of(tokens)
    all_real = jnp.sum(inputs.attention_mask.astype(jnp.float32))
    all_filled = jnp.sum(inputs.filled)

    def part(params: Any, rows: Any, number: jax.Array | None) -> accumulate.Outcome:
        tokens, inputs = rows
        rtd_logits, clm_logits = masked_lm.Discriminator(config.discriminator).apply(
            {"params": warm_start.without_frozen(config.start, params)},
            tokens.input_ids,
            inputs.attention_mask,
            inputs.positions,
            False,
            rngs={"dropout": accumulate.key(rng, number)},
        )
        real = inputs.attention_mask.astype(jnp.float32)
        rtd = losses.replaced_token_detection(rtd_logits, inputs.is_original, real)
        clm = losses.masked_cross_entropy(clm_logits, tokens.originals, inputs.filled)
        parts = {
            "rtd_loss": losses.mean(rtd, all_real),
            "clm_loss": losses.mean(clm, all_filled),
        }
        loss = config.rtd_weight * parts["rtd_loss"]
        loss = loss + config.clm_weight * parts["clm_loss"]
        return accumulate.Outcome(loss, parts, ())

    replaced = jnp.sum(~inputs.is_original & inputs.attention_mask)
    metrics = {
        "fake_token_rate": losses.mean(replaced, all_real),
        "tokens": jnp.sum(inputs.attention_mask),
    }
    return part, (tokens, inputs), metrics


def discriminator_loss(
    config: Config, params: Any, rng: jax.Array, tokens: Tokens
) -> tuple[jax.Array, Metrics]:
    """Computes λ L_D + γ L_CLM of eq. 11, [] float32, and metrics."""
    part, batch, metrics = discriminator_parts(config, rng, tokens)
    outcome = accumulate.total(part, params, batch, config.micro_batches)
    return outcome.loss, {"loss": outcome.loss, **outcome.sums, **metrics}
