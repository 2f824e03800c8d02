"""Generator and discriminator of replaced token detection (section 3.1, Fig. 4).

Their embeddings are not shared, so nothing but token ids has to cross the line.

B batch, L length, D width, V vocabulary, M masked positions.
"""

import jax
from flax import linen as nn

from nebula_jax.models import heads, mask_slots, masked_lm, transformer

Generator = masked_lm.MaskedLM
"""The generator is a masked language model, asked for logits at masked positions."""


class Discriminator(nn.Module):
    """An encoder with an RTD head on every token and a CLM head on masked ones."""

    config: transformer.Config

    def setup(self) -> None:
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
        """Computes logits of which tokens are original, and of the original tokens.

        Args:
          input_ids: [B, L] int32, corrupted.
          attention_mask: [B, L] bool, false at padding.
          positions: [B, M] int32; L in empty slots, whose logits mean nothing.

        Returns:
          rtd_logits: [B, L] float32, log-odds that the token is original.
          clm_logits: [B, M, V] float32, for the original token.
        """
        hidden = self.embeddings(input_ids, deterministic)
        hidden = self.encoder(hidden, attention_mask, deterministic)
        corrupted = mask_slots.gather(hidden, positions)
        return (self.rtd_head(hidden), self.clm_head(corrupted, self.embeddings.table))
