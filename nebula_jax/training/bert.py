"""Masked language modeling as BERT's: its settings, its step, its evaluation.

Every row draws its masks from its number in the whole batch. So a batch that is split
over devices, processes and clusters is masked as if it were in one place, and whatever
is faster (`all_reduce`, `transformer.Config.dtype`) follows the same loss curve.

B rows of a batch, L length, V vocabulary, M slots for masked tokens in a row.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.models import masked_lm, transformer
from nebula_jax.training import (
    accumulate,
    all_reduce,
    losses,
    masking,
    optimizers,
    partition,
    warm_start,
)
from nebula_jax.training import state as train_state

TRAINS: dict[str, partition.IsTrained] = {
    "all": partition.train_all,
    "adapters_and_head": lambda path: path.startswith(("adapter_", "mlm_head/")),
}
"""The parameters that train; the others are frozen, and never cross a line. The head is
for a pretrained encoder that comes without one."""
PAD = vocabularies.SPECIAL.pad


@dataclasses.dataclass(frozen=True)
class Config:
    """The settings that determine the arithmetic of BERT's pre-training."""

    encoder: transformer.Config
    steps: int  # optimization steps; the learning rate falls to 0 after them
    mask_rate: float = 0.15  # share of tokens that are masked
    mask_policy: str = "bert"  # a name in masking.POLICIES
    micro_batches: int = 1  # parts of a device's rows whose gradients are added up
    all_reduce: str = "once"  # a name in all_reduce.WHEN
    trains: str = "all"  # a name in TRAINS
    adapter_dim: int = 64  # inner width of each layer's adapter (eq. 12), if any train
    optimizer: str = "adamw"  # a name in optimizers.BY_NAME
    learning_rate: float = 1e-4  # peak
    warmup: float = 0.06  # share of the run in which the rate rises (24hBERT: 6 %)
    weight_decay: float = 0.01  # decoupled; none for biases and layer norms
    clip_norm: float = 1.0  # largest global norm of the gradient; 0 for no clipping
    start: warm_start.Config = warm_start.NONE  # the protection of a pretrained encoder

    def transformation(self) -> optax.GradientTransformation:
        """Makes the optimizer."""

        def rate(count: jax.Array) -> jax.Array:
            share = optimizers.rise_and_fall(count / self.steps, self.warmup)
            return self.learning_rate * share

        make = functools.partial(
            optimizers.BY_NAME[self.optimizer],
            beta2=0.98,  # 24hBERT's
            weight_decay=self.weight_decay,
        )
        if self.start == warm_start.NONE:
            return make(rate, clip_norm=self.clip_norm)
        return warm_start.optimizer(
            self.start,
            make(lambda _: 1.0),
            peak=self.learning_rate,
            warmup_steps=round(self.warmup * self.steps),
            steps=self.steps,
            layers=self.encoder.layers,
            clip_norm=self.clip_norm,
        )

    def module(self) -> masked_lm.MaskedLM:
        """Returns the network."""
        adapter_dim = 0 if self.trains == "all" else self.adapter_dim
        return masked_lm.MaskedLM(self.encoder, adapter_dim)

    def is_trained(self, path: str) -> bool:
        """Returns True if the parameter of this path trains."""
        return TRAINS[self.trains](path) and warm_start.is_trained(self.start, path)


class Sums(NamedTuple):
    """The sums of an evaluation; those of several batches can be added up."""

    loss: jax.Array  # [] float32, of -log p(token) over masked tokens, in nats
    masked: jax.Array  # [] float32, masked tokens
    correct: jax.Array  # [] float32, masked tokens that were predicted


def init(
    config: Config, seed: int, encoder: Any = None
) -> tuple[train_state.TrainState, Any]:
    """Initializes a run, the same in all clusters.

    `encoder` has parameters to begin with: `embeddings`, `encoder`, and perhaps
    `mlm_head` and adapters. What is not in it is drawn, all if it is None. Returns the
    state of the trained parameters, and the frozen ones (`partition.split`).
    """
    init_rng, step_rng = jax.random.split(jax.random.key(seed))
    model = config.module()
    ids = jnp.zeros((1, config.encoder.max_length), jnp.int32)

    def draw() -> Any:
        return model.init(init_rng, ids, ids == 0, ids[:, :1])["params"]

    params = draw() if encoder is None else warm_start.completed(draw, encoder)
    trained, frozen = partition.split(params, config.is_trained)
    state = train_state.create(trained, config.transformation(), step_rng)
    return state, frozen


def mask(
    config: Config, rng: jax.Array, input_ids: jax.Array, first_row: jax.Array | int = 0
) -> masking.Masked:
    """Masks rows, each from the key of its own number: `first_row` and those after."""
    numbers = first_row + jnp.arange(input_ids.shape[0])
    return masking.mask_rows(
        masking.example_keys(rng, numbers),
        input_ids,
        rate=config.mask_rate,
        policy=masking.POLICIES[config.mask_policy],
        vocab_size=config.encoder.vocab_size,
    )


def loss_of(
    config: Config, rng: jax.Array | None, weight: jax.Array, frozen: Any
) -> accumulate.Loss:
    """Returns the loss of a micro-batch: its share of the mean over masked tokens.

    With it, how many tokens were predicted: of several equally likely, each counts.
    `rng` is for dropout; `weight` [] float32 are masked tokens of the whole batch.
    """
    model = config.module()

    def part(trained: Any, rows: masking.Masked, number: Any) -> accumulate.Outcome:
        is_masked = rows.positions < rows.input_ids.shape[-1]
        weights = is_masked.astype(jnp.float32)
        logits = model.apply(
            {"params": partition.merge(trained, frozen)},
            rows.input_ids,
            rows.input_ids != PAD,
            rows.positions,
            rng is None,
            rngs={} if rng is None else {"dropout": accumulate.key(rng, number)},
        )
        entropy = losses.masked_cross_entropy(logits, rows.originals, weights)
        places = rows.originals[..., None]
        of_label = jnp.take_along_axis(logits, places, axis=-1)[..., 0]
        # An argmax would be another pass over the logits, and a slow one.
        correct = jnp.sum((of_label >= jnp.max(logits, axis=-1)) * weights)
        return accumulate.Outcome(losses.mean(entropy, weight), correct, ())

    return part


def _weight(rows: masking.Masked) -> jax.Array:
    """Counts the masked tokens, [] float32."""
    length = rows.input_ids.shape[-1]
    return jnp.sum((rows.positions < length).astype(jnp.float32))


def step(
    config: Config,
    state: train_state.TrainState,
    frozen: Any,
    input_ids: jax.Array,
    first_row: jax.Array,
) -> tuple[train_state.TrainState, dict[str, jax.Array]]:
    """Takes one optimization step on text [B, L] int32, padded.

    Its first row has number `first_row`, [] int32, in the batch of all clusters.
    Returns the next state, and scalars: loss (mean over masked tokens), accuracy (share
    of them that was predicted), tokens, masked, is_finite. Raises errors.SettingsError
    as `all_reduce.gradients`.
    """
    mask_rng, dropout_rng = jax.random.split(state.key())
    rows = mask(config, mask_rng, input_ids, first_row)
    weight = _weight(rows)
    # Only parity without dropout is promised: what is dropped depends on the cluster,
    # the device and the micro-batch.
    rng = jax.random.fold_in(dropout_rng, first_row) if config.encoder.dropout else None
    grads, outcome = all_reduce.gradients(
        loss_of(config, rng, weight, frozen),
        state.params,
        rows,
        config.micro_batches,
        config.all_reduce,
    )
    metrics = {
        "loss": outcome.loss,
        "accuracy": losses.mean(outcome.sums, weight),
        "tokens": jnp.sum(rows.input_ids != PAD),
        "masked": weight,
    }
    words = warm_start.words_seen(input_ids, config.encoder.vocab_size)
    seen = warm_start.Seen(words)
    return state.apply_gradients(grads, config.transformation(), metrics, seen=seen)


def evaluate(
    config: Config,
    params: Any,
    rng: jax.Array,
    input_ids: jax.Array,
    first_row: jax.Array | int = 0,
) -> Sums:
    """Computes the loss on held-out text [B, L] int32, padded, without dropout.

    Rows may be [PAD] throughout; the first is `first_row` of that text. `params` are
    all (`partition.merge`); the same key for the masks gives the same masks.
    """
    rows = mask(config, rng, input_ids, first_row)
    outcome = loss_of(config, None, jnp.ones(()), {})(params, rows, None)
    return Sums(outcome.loss, _weight(rows), outcome.sums)
