"""An encoder that classifies pairs of sentences (section 4.1, XNLI).

Embeddings, encoder, then the head of BERT and ERNIE-M: the hidden state of [CLS], a
dense layer with tanh (the pretrained pooler where there is one), dropout, dense(C).

B batch, L length, D width, C classes.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from nebula_jax.data import tokenizers
from nebula_jax.models import pretrained, transformer

POOLINGS = ("cls", "mean")


@dataclasses.dataclass(frozen=True)
class Config:
    """The shape of a classifier."""

    encoder: transformer.Config  # with the encoder's dropout
    special: tokenizers.SpecialTokens  # the first separator ends the first sentence
    classes: int = 3  # C
    pooling: str = "cls"  # first position; `mean`: all but padding, as e5 was trained
    has_segments: bool = False  # True if the second sentence has type 1 (BERT, ELECTRA)
    dropout: float = 0.1  # rate before the last layer


def config(
    model: pretrained.Pretrained, tokenizer: tokenizers.Tokenizer, **fields: Any
) -> Config:
    """Makes the Config of a model with its tokenizer; `fields` are the other fields."""
    of_xlm_r = tokenizer.piece(tokenizer.special.cls) == "<s>"
    return Config(
        encoder=model.config,
        special=tokenizer.special,
        has_segments=model.config.token_types > 1 and not of_xlm_r,
        **fields,
    )


class Head(nn.Module):
    """The layers above the encoder: dense, tanh, dropout, dense(C)."""

    config: Config

    @nn.compact
    def __call__(self, pooled: jax.Array, deterministic: bool) -> jax.Array:
        """Maps pooled [B, D] to logits [B, C] float32."""
        config = self.config.encoder
        pooled = jnp.tanh(transformer.dense(config.width, config, "dense")(pooled))
        pooled = nn.Dropout(self.config.dropout)(pooled, deterministic=deterministic)
        return transformer.dense(self.config.classes, config, "output")(pooled)


def init(config: Config, rng: jax.Array, model: pretrained.Pretrained) -> Any:
    """Makes parameters: embeddings and encoder; a new head, perhaps on a pooler."""
    pooled = jnp.zeros((1, config.encoder.width))
    head = Head(config).init(rng, pooled, True)["params"]
    if "pooler" in model.params:
        head = head | {"dense": model.params["pooler"]["dense"]}
    return {part: model.params[part] for part in ("embeddings", "encoder")} | {
        "classifier": head
    }


def segments(input_ids: jax.Array, sep: int) -> jax.Array:
    """Computes token types [B, L] int32: 0 up to the first separator, then 1."""
    is_separator = (input_ids == sep).astype(jnp.int32)
    before = jnp.cumsum(is_separator, axis=-1) - is_separator
    return jnp.minimum(before, 1)


def logits(
    config: Config, params: Any, input_ids: jax.Array, rng: jax.Array | None = None
) -> jax.Array:
    """Computes logits [B, C] float32 of padded pairs [B, L] int32; rng: of dropout."""
    deterministic = rng is None
    keys = [None] * 3 if rng is None else jax.random.split(rng, 3)
    rngs = [{} if key is None else {"dropout": key} for key in keys]
    mask = input_ids != config.special.pad
    types = segments(input_ids, config.special.sep) if config.has_segments else None
    hidden = transformer.Embeddings(config.encoder).apply(
        {"params": params["embeddings"]}, input_ids, deterministic, types, rngs=rngs[0]
    )
    hidden = transformer.Encoder(config.encoder).apply(
        {"params": params["encoder"]}, hidden, mask, deterministic, rngs=rngs[1]
    )
    return Head(config).apply(
        {"params": params["classifier"]},
        pool(config.pooling, hidden, mask),
        deterministic,
        rngs=rngs[2],
    )


def pool(how: str, hidden: jax.Array, attention_mask: jax.Array) -> jax.Array:
    """Pools [B, L, D] float32 to [B, D]; the mask [B, L] bool is false at padding."""
    if how == "cls":
        return hidden[:, 0]
    weights = attention_mask.astype(jnp.float32)
    total = jnp.einsum("bld,bl->bd", hidden, weights)
    return total / jnp.sum(weights, axis=-1, keepdims=True)
