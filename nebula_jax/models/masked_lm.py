"""The masked language model of BERT, with adapters if only those are to train.

B batch, L length, D width, V vocabulary, M masked positions.
"""

from collections.abc import Callable

import jax
from flax import linen as nn

from nebula_jax.models import adapters, heads, mask_slots, transformer

ADAPTER_SCALE = 0.0
"""Scale of the adapters' first outputs: the model begins as the pretrained one."""


class MaskedLM(nn.Module):
    """An encoder with an MLM head; also the generator of M3 (section 3.1).

    With adapters there is `adapter_0`, `adapter_1`, ... besides, one after each layer
    (eq. 12; Fig. 2: only these need to train and to cross).
    """

    config: transformer.Config
    adapter_dim: int = 0
    """Inner width of an adapter (R of `adapters`); 0 for none."""

    def setup(self) -> None:
        config = self.config
        self.embeddings = transformer.Embeddings(config)
        self.encoder = transformer.Encoder(config)
        self.mlm_head = heads.MLMHead(config)
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
        """Computes logits of masked tokens; returns [B, M, V] float32.

        Args:
          input_ids: [B, L] int32, with [MASK]s.
          attention_mask: [B, L] bool, false at padding.
          masked: [B, M] int32, places of masked tokens; L in empty slots, whose logits
            mean nothing.
        """
        hidden = self.embeddings(input_ids, deterministic)
        hidden = self.encoder(
            hidden, attention_mask, deterministic, self._after_layer()
        )
        return self.mlm_head(mask_slots.gather(hidden, masked), self.embeddings.table)

    def _after_layer(self) -> Callable[[int, jax.Array], jax.Array] | None:
        if not self.adapter_dim:
            return None
        return lambda layer, hidden: self.adapter[layer](hidden)
