"""Output heads (sections 3.1, 4.1).

B batch, L length, D width, V vocabulary, M masked positions,
E width of the embeddings.
"""

import jax
from flax import linen as nn

from nebula_jax.models import activations, transformer


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
