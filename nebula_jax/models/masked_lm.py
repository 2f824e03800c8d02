"""Masked language models, with adapters if only those train; heads; a discriminator.

Generator and discriminator of replaced token detection (section 3.1, Fig. 4; 4.1) share
no embeddings, so nothing but token ids has to cross the line.

B batch, L length, D width, V vocabulary, M masked positions, E width of the embeddings.
"""

import jax
from flax import linen as nn

from nebula_jax.models import activations, adapters, mask_slots, transformer

ADAPTER_SCALE = 0.0  # of adapters' first outputs: the model begins as the pretrained


class MLMHead(nn.Module):
    """A masked language model's head: dense, GELU, layer norm, tied table plus bias."""

    config: transformer.Config

    @nn.compact
    def __call__(self, hidden: jax.Array, table: jax.Array) -> jax.Array:
        """Maps hidden [B, M, D] and table [V, E] to logits [B, M, V] float32."""
        config = self.config
        width = config.embedding_width or config.width
        dense = transformer.dense(width, config, "dense", use_bias=config.has_biases)
        hidden = activations.place(dense(hidden), activations.ROWS)
        hidden = jax.nn.gelu(hidden, approximate=False)
        hidden = transformer.layer_norm("layer_norm", config)(hidden)
        return _tied(self, hidden, table)


class CLMHead(nn.Module):
    """A corrective language model's head: tied table plus bias, no more (COCO-LM)."""

    config: transformer.Config

    @nn.compact
    def __call__(self, hidden: jax.Array, table: jax.Array) -> jax.Array:
        """Maps hidden [B, M, D] and table [V, D] to logits [B, M, V] float32."""
        return _tied(self, hidden, table)


class RTDHead(nn.Module):
    """A head for replaced token detection: dense, GELU, dense(1) (ELECTRA)."""

    config: transformer.Config

    @nn.compact
    def __call__(self, hidden: jax.Array) -> jax.Array:
        """Maps hidden [B, L, D] to logits [B, L] float32 that a token is original."""
        config = self.config
        hidden = transformer.dense(config.width, config, "dense")(hidden)
        hidden = activations.place(hidden, activations.ROWS)
        hidden = jax.nn.gelu(hidden, approximate=False)
        logits = transformer.dense(1, config, "output")(hidden)
        return activations.place(logits, activations.ROWS)[..., 0]


def _tied(head: nn.Module, hidden: jax.Array, table: jax.Array) -> jax.Array:
    bias = head.param("bias", nn.initializers.zeros, (table.shape[0],))
    logits = transformer.einsum("bmd,vd->bmv", hidden, table, head.config)
    logits = activations.place(logits, activations.ROWS, None, activations.MODEL)
    return logits + bias[None, None]


class MaskedLM(nn.Module):
    """An encoder with an MLM head; also the generator of M3 (section 3.1).

    With adapters there is `adapter_0`, `adapter_1`, ... besides, one after each layer
    (eq. 12; Fig. 2: only these need to train and to cross).
    """

    config: transformer.Config
    adapter_dim: int = 0  # inner width of an adapter (R of `adapters`); 0 for none

    def setup(self) -> None:
        config = self.config
        self.embeddings = transformer.Embeddings(config)
        self.encoder = transformer.Encoder(config)
        self.mlm_head = MLMHead(config)
        self.adapter = [
            adapters.EncoderAdapter(config, self.adapter_dim, ADAPTER_SCALE)
            for _ in range(config.layers if self.adapter_dim else 0)
        ]

    def __call__(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array,
        masked: jax.Array,
        deterministic: bool = True,
    ) -> jax.Array:
        """Computes logits [B, M, V] float32 of masked tokens in text [B, L] int32.

        The attention mask [B, L] bool is false at padding. `masked` [B, M] int32 are
        places of tokens; L in empty slots, whose logits are arbitrary.
        """
        hidden = self.embeddings(input_ids, deterministic)
        after_layer = self._adapted if self.adapter_dim else None
        hidden = self.encoder(hidden, attention_mask, deterministic, after_layer)
        return self.mlm_head(mask_slots.gather(hidden, masked), self.embeddings.table)

    def _adapted(self, layer: int, hidden: jax.Array) -> jax.Array:
        return self.adapter[layer](hidden)


class Discriminator(nn.Module):
    """An encoder with an RTD head on every token and a CLM head on masked ones."""

    config: transformer.Config

    def setup(self) -> None:
        self.embeddings = transformer.Embeddings(self.config)
        self.encoder = transformer.Encoder(self.config)
        self.rtd_head = RTDHead(self.config)
        self.clm_head = CLMHead(self.config)

    def __call__(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array,
        positions: jax.Array,
        deterministic: bool = True,
    ) -> tuple[jax.Array, jax.Array]:
        """Computes the log-odds that tokens are original, and logits of the originals.

        Of corrupted text [B, L] int32 the former are [B, L] float32; at positions
        [B, M] int32 (L in empty slots, whose logits mean nothing) the latter are
        [B, M, V] float32. The attention mask [B, L] bool is false at padding.
        """
        hidden = self.embeddings(input_ids, deterministic)
        hidden = self.encoder(hidden, attention_mask, deterministic)
        corrupted = mask_slots.gather(hidden, positions)
        return (self.rtd_head(hidden), self.clm_head(corrupted, self.embeddings.table))
