"""Transformer encoders: BERT's post-LN (Devlin et al. 2018; section 4.1), or `modern`.

B batch, L length, D width, H heads, K head width, F feed-forward, V vocabulary,
E width of the embeddings (D, save in ELECTRA), Q query positions, M key and value
positions.

Matrix products take operands in `Config.dtype` and accumulate in float32; parameters,
residuals, softmax and layer norms are float32. (Frozen matrices may be in
`Config.dtype` already, see `mixed_precision.cast_kernels`.)
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import Mesh

from nebula_jax import errors
from nebula_jax.models import activations, mixed_precision, modern, stages
from nebula_jax.models.activations import MODEL, ROWS, place

INITIALIZER = nn.initializers.normal(stddev=0.02)  # BERT's, of embeddings
BERT_WIDTH = 768

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
BODIES = {"bert": None, "modern": modern.Body()}
"""Name -> `Config.body`."""


@dataclasses.dataclass(frozen=True)
class Config:
    """The shape of an encoder."""

    vocab_size: int  # V, pieces of the vocabulary
    layers: int  # transformer blocks
    width: int  # D, hidden units
    heads: int  # H; divides D
    feed_forward: int  # F, inner units of the feed-forward part
    max_length: int  # L, positions with an embedding; of a `body`, what it is made for
    dropout: float = 0.0  # of embeddings, attention probabilities, sublayer outputs
    dtype: str = "float32"  # operands of matrix products: `float32` or `bfloat16`
    token_types: int = 0  # those with an embedding (BERT: 2; ERNIE-M has none)
    layer_norm_epsilon: float = 1e-12  # BERT's, on the variance (XLM-R, ERNIE-M: 1e-5)
    position_offset: int = 0  # rows before the first position's (XLM-R, ERNIE-M: 2)
    remat: bool = False  # True to compute activations again for gradients, keeping none
    pipeline: int = 0  # micro-batches that go through `stages`; 0 for no pipeline
    embedding_width: int | None = None  # E, then projected to D (ELECTRA); None: D
    body: modern.Body | None = None  # the layers' form if not BERT's: `PreNormBlock`
    disentangled: bool = False
    """True to embed by a constant copy of the table plus a table of deltas (GDES)."""

    def __post_init__(self) -> None:
        """Raises errors.SettingsError at what cannot be."""
        if self.body is not None and self.pipeline:
            raise errors.SettingsError(
                f"pipeline={self.pipeline} needs layers that are alike, and those of"
                " this body differ; fsdp and model_parallel split them all the same"
            )

    @property
    def has_biases(self) -> bool:
        """True if linear layers and layer norms of the encoder have biases."""
        return self.body is None

    @property
    def operands(self) -> jax.typing.DTypeLike:
        """The type of the operands of matrix products."""
        return DTYPES[self.dtype]


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


def config_of_size(
    size: str, layers: int = 0, body: modern.Body | None = None, **fields: Any
) -> Config:
    """Makes a Config with one of SIZES' shapes; `layers` 0 for those of the size.

    The feed-forward part of a gated body has as many parameters as the size's.
    """
    its_own, width, heads, feed_forward = SIZES[size]
    if body is not None:
        feed_forward = modern.inner_units(feed_forward)
    fields |= {"width": width, "heads": heads, "feed_forward": feed_forward}
    return Config(layers=layers or its_own, body=body, **fields)


def dense(
    features: int | tuple[int, ...],
    config: Config,
    name: str | None,
    axis: int | tuple[int, ...] = -1,
    *,
    kernel_init: nn.initializers.Initializer | None = None,
    use_bias: bool = True,
) -> nn.DenseGeneral:
    """Makes a linear layer that accumulates in float32, with the encoder's dtype.

    `kernel_init` None is BERT's, scaled to the encoder's width; `name` None is Flax's.
    """
    return nn.DenseGeneral(
        features,
        axis=axis,
        # BERT's 0.02, at BERT's width. Scaled, because a block of width 128 with 0.02
        # adds so little to its residual that RTD was near chance after 300 steps.
        kernel_init=kernel_init
        or nn.initializers.normal(0.02 * (BERT_WIDTH / config.width) ** 0.5),
        use_bias=use_bias,
        promote_dtype=_unpromoted,
        dot_general=functools.partial(
            mixed_precision.dot_general, dtype=config.operands
        ),
        name=name,
    )


def _unpromoted(*arrays: jax.Array, dtype: Any) -> tuple[jax.Array, ...]:
    """Replaces Flax's promotion: `mixed_precision` rounds operands that need it."""
    del dtype
    return arrays


def layer_norm(
    name: str | None, config: Config, *, use_bias: bool | None = None
) -> nn.LayerNorm:
    """Makes a layer normalization in float32; None for a bias as the encoder's have."""
    return nn.LayerNorm(
        epsilon=config.layer_norm_epsilon,
        dtype=jnp.float32,
        use_bias=config.has_biases if use_bias is None else use_bias,
        name=name,
    )


def einsum(subscripts: str, a: jax.Array, b: jax.Array, config: Config) -> jax.Array:
    """Computes an einsum with operands in the configured dtype, to float32."""
    return mixed_precision.einsum(subscripts, a, b, config.operands)


class Embeddings(nn.Module):
    """The sum of token, position and token type embeddings, normalized.

    With a `body` there are no position embeddings: its attention turns by positions.
    """

    config: Config

    def setup(self) -> None:
        config = self.config
        width = config.embedding_width or config.width
        self.word_embeddings = nn.Embed(
            config.vocab_size, width, embedding_init=INITIALIZER
        )
        if config.disentangled:
            self.word_deltas = nn.Embed(
                config.vocab_size, width, embedding_init=nn.initializers.zeros
            )
        if config.body is None:
            rows = config.position_offset + config.max_length
            self.position_embeddings = nn.Embed(rows, width, embedding_init=INITIALIZER)
        if config.token_types:
            self.token_type_embeddings = nn.Embed(
                config.token_types, width, embedding_init=INITIALIZER
            )
        self.layer_norm = layer_norm(None, config)
        self.dropout = nn.Dropout(config.dropout)
        if config.embedding_width:
            self.projection = dense(config.width, config, None)

    def __call__(
        self,
        input_ids: jax.Array,
        deterministic: bool,
        token_type_ids: jax.Array | None = None,
        first_position: jax.Array | int = 0,
    ) -> jax.Array:
        """Embeds tokens [B, L] int32; returns [B, L, D] float32.

        Types are [B, L] int32, type 0 everywhere if None. The first token's position,
        [] int32, is for decoding token by token.
        """
        embedded = jnp.take(self.table, input_ids, axis=0)
        if self.config.disentangled:
            # DeBERTaV3's: what the tied output layer learns reaches the input, and
            # what the input learns never the output layer.
            deltas = place(self.word_deltas.embedding, MODEL)
            embedded = jax.lax.stop_gradient(embedded)
            embedded = embedded + jnp.take(deltas, input_ids, axis=0)
        if self.config.body is None:
            positions = first_position + jnp.arange(input_ids.shape[-1])[None, :]
            places = positions + self.config.position_offset
            embedded = embedded + self.position_embeddings(places)
        if self.config.token_types:
            if token_type_ids is None:
                token_type_ids = jnp.zeros((1, 1), jnp.int32)
            embedded += self.token_type_embeddings(token_type_ids)
        embedded = self.layer_norm(place(embedded, ROWS))
        embedded = self.dropout(embedded, deterministic=deterministic)
        return self.projection(embedded) if self.config.embedding_width else embedded

    @property
    def table(self) -> jax.Array:
        """The table [V, E] float32, for output layers tied to it."""
        return place(self.word_embeddings.embedding, MODEL)


class KeyValues(NamedTuple):
    """The keys and values of M positions for attention, [B, M, H, K] float32 each."""

    key: jax.Array
    value: jax.Array

    def write(self, new: "KeyValues", position: jax.Array) -> "KeyValues":
        """Returns these with `new` [B, Q, H, K] from `position`, [] int32, on."""
        return jax.tree.map(
            lambda old, more: jax.lax.dynamic_update_slice_in_dim(
                old, more.astype(old.dtype), position, axis=1
            ),
            self,
            new,
        )


def empty_cache(config: Config, batch_size: int, length: int) -> tuple[KeyValues, ...]:
    """Makes a cache of M = `length` zero positions for every layer of an Encoder."""
    shape = (batch_size, length, config.heads, config.width // config.heads)
    zeros = jnp.zeros(shape, jnp.float32)
    return (KeyValues(zeros, zeros),) * config.layers


def causal_mask(length: int) -> jax.Array:
    """Makes a mask [1, L, L] bool: a position attends to itself and those before it."""
    return jnp.tril(jnp.ones((1, length, length), bool))


def attend(
    query: jax.Array,
    memory: KeyValues,
    attention_mask: jax.Array,
    config: Config,
    drop: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """Computes scaled dot-product attention of queries; both [B, Q, H, K] float32.

    The mask is bool: [B, M], true where all queries may attend, or [B, Q, M], where
    each may; B may be 1. `drop` is the dropout of the probabilities [B, H, Q, M].
    """
    if attention_mask.ndim == 2:
        attention_mask = attention_mask[:, None, :]
    scores = einsum("bqhk,bmhk->bhqm", query, memory.key, config)
    scores = scores * query.shape[-1] ** -0.5
    lowest = jnp.finfo(jnp.float32).min
    scores = jnp.where(attention_mask[:, None, :, :], scores, lowest)
    shares = drop(jax.nn.softmax(scores))
    return einsum("bhqm,bmhk->bqhk", shares, memory.value, config)


class SelfAttention(nn.Module):
    """A multi-head self-attention without the residual."""

    config: Config
    reach: modern.Reach | None = None  # of a layer of a `body`; None for BERT's

    @nn.compact
    def __call__(
        self,
        hidden: jax.Array,
        attention_mask: jax.Array,
        deterministic: bool,
        cache: KeyValues | None = None,
        position: jax.Array | None = None,
    ) -> jax.Array | tuple[jax.Array, KeyValues]:
        """Attends from every position of `hidden` to them all, or to a cache.

        Hidden states are [B, Q, D] float32, the mask [B, M] or [B, Q, M] bool (see
        `attend`). A cache has keys and values of M positions; the Q new ones come to
        its place `position`, [] int32, and it is returned too, with them in it.
        """
        config = self.config
        linear = functools.partial(dense, config=config, use_bias=config.has_biases)
        split = (config.heads, config.width // config.heads)
        query, key, value = (
            place(linear(split, name=name)(hidden), ROWS, None, MODEL)
            for name in ("query", "key", "value")
        )
        if self.reach is not None:
            query, key = (modern.turn(each, self.reach.theta) for each in (query, key))
            window = self.reach.window
            attention_mask = modern.near(attention_mask, hidden.shape[1], window)
        memory = KeyValues(key, value)
        if cache is not None:
            assert position is not None  # a cache comes with a position
            memory = cache.write(memory, position)
        drop = nn.Dropout(config.dropout, deterministic=deterministic)
        context = attend(query, memory, attention_mask, config, drop)
        output = linear(
            config.width, name="output", axis=(-2, -1), kernel_init=_of_residual(config)
        )
        attended = output(context)
        return attended if cache is None else (attended, memory)


class Block(nn.Module):
    """A layer: attention and feed-forward, each with residual and post-layer-norm."""

    config: Config

    @nn.compact
    def __call__(
        self,
        hidden: jax.Array,
        attention_mask: jax.Array,
        deterministic: bool,
        cache: KeyValues | None = None,
        position: jax.Array | None = None,
    ) -> jax.Array | tuple[jax.Array, KeyValues]:
        """Applies the block; arguments and results are those of SelfAttention."""
        config = self.config
        drop = nn.Dropout(config.dropout, deterministic=deterministic)
        attended = SelfAttention(config, name="attention")(
            hidden, attention_mask, deterministic, cache, position
        )
        if cache is not None:
            attended, cache = attended
        hidden = hidden + drop(place(attended, ROWS))
        hidden = layer_norm("attention_layer_norm", config)(hidden)
        inner = dense(config.feed_forward, config, "intermediate")(hidden)
        inner = jax.nn.gelu(place(inner, ROWS, None, MODEL), approximate=False)
        outer = dense(config.width, config, "output")(inner)
        hidden = hidden + drop(place(outer, ROWS))
        hidden = layer_norm("output_layer_norm", config)(hidden)
        return hidden if cache is None else (hidden, cache)


class PreNormBlock(nn.Module):
    """A layer of a `body`: attention and GeGLU, each of normalized hidden states."""

    config: Config
    layer: int  # its number, from 0

    @nn.compact
    def __call__(
        self, hidden: jax.Array, attention_mask: jax.Array, deterministic: bool
    ) -> jax.Array:
        """Applies the block to [B, L, D] float32, with a mask as of `attend`."""
        config = self.config
        assert config.body is not None  # else its layers are of another class
        drop = nn.Dropout(config.dropout, deterministic=deterministic)
        linear = functools.partial(dense, config=config, use_bias=False)
        normed = hidden
        if self.layer > 0:  # embeddings are normalized already
            normed = layer_norm("attention_layer_norm", config)(hidden)
        attention = SelfAttention(
            config, config.body.reach(self.layer), name="attention"
        )
        attended = attention(normed, attention_mask, deterministic)
        hidden = hidden + drop(place(attended, ROWS))
        normed = layer_norm("feed_forward_layer_norm", config)(hidden)
        inner, gate = (
            place(linear(config.feed_forward, name=name)(normed), ROWS, None, MODEL)
            for name in ("intermediate", "gate")
        )
        inner = jax.nn.gelu(inner, approximate=False) * gate
        output = linear(config.width, name="output", kernel_init=_of_residual(config))
        return hidden + drop(place(output(inner), ROWS))


def _of_residual(config: Config) -> nn.initializers.Initializer | None:
    """Returns the initializer of matrices whose outputs a residual adds up.

    Nothing normalizes the sum of a pre-norm encoder's 2 N parts, so each is smaller by
    the root of their number (GPT-2, ModernBERT). None: that of all matrices.
    """
    if config.body is None:
        return None
    return nn.initializers.normal(
        0.02 * (BERT_WIDTH / config.width / (2 * config.layers)) ** 0.5
    )


class Encoder(nn.Module):
    """A stack of blocks."""

    config: Config

    @nn.compact
    def __call__(
        self,
        hidden: jax.Array,
        attention_mask: jax.Array,
        deterministic: bool,
        after_layer: Callable[[int, jax.Array], jax.Array] | None = None,
        cache: Sequence[KeyValues] | None = None,
        position: jax.Array | None = None,
    ) -> jax.Array | tuple[jax.Array, tuple[KeyValues, ...]]:
        """Applies the blocks; arguments and results are those of SelfAttention.

        A cache has a part for each layer, for decoding token by token. For adapters,
        `after_layer` is (layer, its output) -> the next layer's input.
        """
        config, mesh = self.config, activations.mesh()
        if config.body is not None and cache is not None:
            raise errors.SettingsError(
                "cache: the layers of a body keep none for decoding token by token;"
                " BERT's do (body=None)"
            )
        is_plain = cache is None and after_layer is None
        if config.pipeline and mesh is not None and is_plain:  # the parameters exist
            return self._pipelined(hidden, attention_mask, deterministic, mesh)
        successors = []
        kind: Any = Block if config.body is None else PreNormBlock
        # A block's argument 3, counted from self, is `deterministic`.
        block_class = nn.remat(kind, static_argnums=3) if config.remat else kind
        for layer in range(config.layers):
            number = {} if config.body is None else {"layer": layer}
            block = block_class(config, **number, name=f"layer_{layer}")
            if cache is None:
                hidden = block(hidden, attention_mask, deterministic)
            else:
                hidden, successor = block(
                    hidden, attention_mask, deterministic, cache[layer], position
                )
                successors.append(successor)
            if after_layer is not None:
                hidden = after_layer(layer, hidden)
        if config.body is not None:
            hidden = layer_norm("final_layer_norm", config)(hidden)
        return hidden if cache is None else (hidden, tuple(successors))

    def _pipelined(
        self,
        hidden: jax.Array,
        attention_mask: jax.Array,
        deterministic: bool,
        mesh: Mesh,
    ) -> jax.Array:
        """Applies the blocks as the stages of a pipeline; arguments as for a call."""
        config = self.config
        params = [self.variables["params"][f"layer_{k}"] for k in range(config.layers)]
        draws = config.dropout > 0 and not deterministic
        rng = self.make_rng("dropout") if draws else None
        call = Block(config, parent=None).apply
        given = hidden, attention_mask, deterministic, rng
        return stages.apply(call, params, *given, config.pipeline, config.remat, mesh)


def hidden_states(
    config: Config,
    params: Mapping[str, Any],
    input_ids: jax.Array,
    attention_mask: jax.Array,
    after_layer: Callable[[int, jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """Applies Embeddings and Encoder to text [B, L] int32; returns [B, L, D] float32.

    Without dropout. The mask is [B, L] or [B, L, L] bool (see `attend`); `params` has
    `embeddings` and `encoder`, perhaps among others.
    """
    embeddings, encoder = ({"params": params[n]} for n in ("embeddings", "encoder"))
    hidden = Embeddings(config).apply(embeddings, input_ids, True)
    return Encoder(config).apply(encoder, hidden, attention_mask, True, after_layer)
