"""BERT-style post-LN Transformer encoder (Devlin et al. 2018; section 4.1).

B batch, L length, D width, H heads, K head width, F feed-forward, V vocabulary.

Matrix products take operands in `Config.dtype` and accumulate in float32; parameters,
residuals, softmax and layer norms are float32.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import linen as nn

LAYER_NORM_EPSILON = 1e-12  # BERT's
INITIALIZER = nn.initializers.normal(stddev=0.02)  # BERT's, of embeddings
BERT_WIDTH = 768

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


@dataclasses.dataclass(frozen=True)
class Config:
    """Shape of an encoder."""

    vocab_size: int
    """V, pieces of the vocabulary."""
    layers: int
    """Transformer blocks."""
    width: int
    """D, hidden units."""
    heads: int
    """H; divides D."""
    feed_forward: int
    """F, inner units of the feed-forward part."""
    max_length: int
    """L, positions that have an embedding."""
    dropout: float = 0.0
    """Rate on embeddings, attention probabilities and sublayer outputs."""
    dtype: str = "float32"
    """Operands of matrix products: `float32` or `bfloat16`."""


# layers, width, heads, feed-forward. The first five have BERT's published names.
SIZES = {
    "nano": (2, 64, 2, 256),  # our choice: a test compiles it in a second
    "tiny": (2, 128, 2, 512),
    "mini": (4, 256, 4, 1024),
    "small": (4, 512, 8, 2048),
    "medium": (8, 512, 8, 2048),
    "base": (12, 768, 12, 3072),  # the paper's generator, section 4.1
    "large": (24, 1024, 16, 4096),  # the paper's discriminator, section 4.1
}


def config_of_size(size: str, **fields) -> Config:
    """A Config with one of SIZES' shapes; `fields` are the others."""
    layers, width, heads, feed_forward = SIZES[size]
    return Config(
        layers=layers, width=width, heads=heads, feed_forward=feed_forward, **fields
    )


def dense(features, config: Config, name: str, axis=-1) -> nn.DenseGeneral:
    """A linear layer with BERT's initialisation and float32 accumulation."""
    return nn.DenseGeneral(
        features,
        axis=axis,
        dtype=DTYPES[config.dtype],
        # BERT's 0.02, at BERT's width. Scaled, because a block of width 128 with 0.02
        # adds so little to its residual that RTD was near chance after 300 steps.
        kernel_init=nn.initializers.normal(0.02 * (BERT_WIDTH / config.width) ** 0.5),
        dot_general=functools.partial(
            jax.lax.dot_general, preferred_element_type=jnp.float32
        ),
        name=name,
    )


def layer_norm(name: str) -> nn.LayerNorm:
    """Layer normalisation in float32."""
    return nn.LayerNorm(epsilon=LAYER_NORM_EPSILON, dtype=jnp.float32, name=name)


def einsum(subscripts: str, a: jax.Array, b: jax.Array, config: Config) -> jax.Array:
    """einsum with operands in the configured dtype and a float32 result."""
    dtype = DTYPES[config.dtype]
    return jnp.einsum(
        subscripts,
        a.astype(dtype),
        b.astype(dtype),
        preferred_element_type=jnp.float32,
    )


class Embeddings(nn.Module):
    """Token plus position embeddings, normalised. No token types (ERNIE-M)."""

    config: Config

    def setup(self):
        config = self.config
        self.word_embeddings = nn.Embed(
            config.vocab_size, config.width, embedding_init=INITIALIZER
        )
        self.position_embeddings = nn.Embed(
            config.max_length, config.width, embedding_init=INITIALIZER
        )
        self.layer_norm = layer_norm(None)
        self.dropout = nn.Dropout(config.dropout)

    def __call__(self, input_ids: jax.Array, deterministic: bool) -> jax.Array:
        """input_ids [B, L] int32 -> [B, L, D] float32."""
        positions = jnp.arange(input_ids.shape[-1])[None, :]
        embedded = self.word_embeddings(input_ids) + self.position_embeddings(positions)
        return self.dropout(self.layer_norm(embedded), deterministic=deterministic)

    @property
    def table(self) -> jax.Array:
        """[V, D] float32, for output layers tied to it."""
        return self.word_embeddings.embedding


class SelfAttention(nn.Module):
    """Multi-head self-attention without the residual."""

    config: Config

    @nn.compact
    def __call__(
        self, hidden: jax.Array, attention_mask: jax.Array, deterministic: bool
    ) -> jax.Array:
        """hidden [B, L, D], attention_mask [B, L] bool -> [B, L, D] float32."""
        config = self.config
        head_width = config.width // config.heads
        split = (config.heads, head_width)
        query = dense(split, config, "query")(hidden)
        key = dense(split, config, "key")(hidden)
        value = dense(split, config, "value")(hidden)

        scores = einsum("bqhk,bmhk->bhqm", query, key, config) * head_width**-0.5
        lowest = jnp.finfo(jnp.float32).min
        scores = jnp.where(attention_mask[:, None, None, :], scores, lowest)
        attention = nn.Dropout(config.dropout)(
            jax.nn.softmax(scores), deterministic=deterministic
        )
        context = einsum("bhqm,bmhk->bqhk", attention, value, config)
        return dense(config.width, config, "output", axis=(-2, -1))(context)


class Block(nn.Module):
    """Attention and feed-forward, each with residual and post-layer-norm."""

    config: Config

    @nn.compact
    def __call__(
        self, hidden: jax.Array, attention_mask: jax.Array, deterministic: bool
    ) -> jax.Array:
        """hidden [B, L, D], attention_mask [B, L] bool -> [B, L, D] float32."""
        config = self.config
        drop = functools.partial(
            nn.Dropout(config.dropout), deterministic=deterministic
        )
        attended = SelfAttention(config, name="attention")(
            hidden, attention_mask, deterministic
        )
        hidden = layer_norm("attention_layer_norm")(hidden + drop(attended))
        inner = dense(config.feed_forward, config, "intermediate")(hidden)
        inner = jax.nn.gelu(inner, approximate=False)
        outer = dense(config.width, config, "output")(inner)
        return layer_norm("output_layer_norm")(hidden + drop(outer))


class Encoder(nn.Module):
    """A stack of blocks."""

    config: Config

    @nn.compact
    def __call__(
        self, hidden: jax.Array, attention_mask: jax.Array, deterministic: bool
    ) -> jax.Array:
        """hidden [B, L, D], attention_mask [B, L] bool -> [B, L, D] float32."""
        for layer in range(self.config.layers):
            hidden = Block(self.config, name=f"layer_{layer}")(
                hidden, attention_mask, deterministic
            )
        return hidden
