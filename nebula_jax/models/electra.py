"""Generator and discriminator of replaced token detection (section 3.1, Fig. 4).

Their embeddings are not shared: that is what keeps all but word indices off the line.

B batch, L length, V vocabulary, M masked positions.
"""

import jax
from flax import linen as nn

from nebula_jax.models import heads, mask_slots, transformer


class Generator(nn.Module):
    """A masked language model that is asked only at masked positions."""

    config: transformer.Config

    def setup(self):
        self.embeddings = transformer.Embeddings(self.config)
        self.encoder = transformer.Encoder(self.config)
        self.mlm_head = heads.MLMHead(self.config)

    def __call__(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array,
        positions: jax.Array,
        deterministic: bool = True,
    ) -> jax.Array:
        """Logits of the masked tokens.

        Args:
          input_ids: [B, L] int32, with [MASK]s.
          attention_mask: [B, L] bool, false at padding.
          positions: [B, M] int32; L in empty slots, whose logits mean nothing.
          deterministic: no dropout.

        Returns:
          [B, M, V] float32.
        """
        hidden = self.embeddings(input_ids, deterministic)
        hidden = self.encoder(hidden, attention_mask, deterministic)
        hidden = mask_slots.gather(hidden, positions)
        return self.mlm_head(hidden, self.embeddings.table)


class Discriminator(nn.Module):
    """An encoder with an RTD head on every token and a CLM head on masked ones."""

    config: transformer.Config

    def setup(self):
        self.embeddings = transformer.Embeddings(self.config)
        self.encoder = transformer.Encoder(self.config)
        self.rtd_head = heads.RTDHead(self.config)
        self.clm_head = heads.CLMHead(self.config)

    def __call__(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array,
        positions: jax.Array,
        deterministic: bool = True,
    ) -> tuple[jax.Array, jax.Array]:
        """Which tokens are original, and what the corrupted ones were.

        Args:
          input_ids: [B, L] int32, corrupted.
          attention_mask: [B, L] bool, false at padding.
          positions: [B, M] int32; L in empty slots, whose logits mean nothing.
          deterministic: no dropout.

        Returns:
          rtd_logits: [B, L] float32, log-odds that the token is original.
          clm_logits: [B, M, V] float32, for the original token.
        """
        hidden = self.embeddings(input_ids, deterministic)
        hidden = self.encoder(hidden, attention_mask, deterministic)
        corrupted = mask_slots.gather(hidden, positions)
        return (
            self.rtd_head(hidden),
            self.clm_head(corrupted, self.embeddings.table),
        )
