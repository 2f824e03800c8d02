"""Rows of masked text, in which each sequence is masked by its number.

Short sequences may share a row (`data.joined_rows`): they are masked as if each had a
row of its own, and then gathered. Attention stays within a sequence.

B sequences of a batch; R rows, of which there are B, or fewer if sequences are joined;
L length; M slots for masked tokens in a row.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from nebula_jax.data import joined_rows
from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.models import mask_slots
from nebula_jax.training import abnet_losses, all_reduce, masking

PAD = vocabularies.SPECIAL.pad


class Rows(NamedTuple):
    """The rows of a batch, masked.

    input_ids: [R, L] int32, with [MASK]s.
    is_text: [R, L] bool, false at padding.
    where: [R, L] int32, the place of each token in the batch of sequences (see
      `joined_rows.Plan`); None if each sequence has a row.
    masked: [R, M] int32, ascending places of masked tokens; L in empty slots.
    originals: [R, M] int32, the tokens there; 0 in empty slots.
    """

    input_ids: jax.Array
    is_text: jax.Array
    where: jax.Array | None
    masked: jax.Array
    originals: jax.Array

    def weight(self) -> jax.Array:
        """Counts the masked tokens, [] float32."""
        return jnp.sum((self.masked < self.input_ids.shape[-1]).astype(jnp.float32))

    def attention(self) -> tuple[jax.Array, jax.Array | None]:
        """Returns the attention mask of an encoder, and the positions of tokens.

        Returns:
          [R, L] bool, true at text; or [R, L, L] bool, true within a sequence.
          [R, L] int32, positions in the sequences; None if they are those in the row.
        """
        if self.where is None:
            return self.is_text, None
        length = self.where.shape[-1]
        sequence = self.where // length  # -1 at padding, which attends to itself
        return sequence[:, :, None] == sequence[:, None, :], self.where % length


def slots(rate: float, max_length: int, is_joined: bool) -> int:
    """Computes M, the most tokens that `mask` can mask in a row.

    Args:
      rate: share of tokens to mask.
      max_length: L.
      is_joined: whether sequences share rows.
    """
    if not is_joined:
        return masking.capacity(rate, max_length)
    # Each sequence has at most one masked token more than its share.
    return int(rate * max_length) + joined_rows.MOST


def mask(
    rng: jax.Array,
    input_ids: jax.Array,
    first_row: jax.Array | int,
    where: jax.Array | None,
    *,
    rate: float,
    policy: masking.Policy,
    vocab_size: int,
) -> Rows:
    """Masks a batch of sequences, and joins them if there is a plan.

    Args:
      rng: key.
      input_ids: [B, L] int32, padded text.
      first_row: [] int32, number of the first sequence; each draws from the key of its
        own number.
      where: [R, L] int32, of `joined_rows.plan`; None to join nothing.
      rate, policy, vocab_size: those of `masking.mask_tokens`.
    """
    numbers = first_row + jnp.arange(input_ids.shape[0])
    masked = masking.mask_rows(
        abnet_losses.example_keys(rng, numbers),
        input_ids,
        rate=rate,
        policy=policy,
        vocab_size=vocab_size,
    )
    if where is None:
        is_text = input_ids != PAD
        return Rows(masked.input_ids, is_text, None, masked.positions, masked.originals)
    length = input_ids.shape[-1]
    marks = _joined(mask_slots.mark(masked.positions, length), where)
    positions = mask_slots.find(marks, slots(rate, length, is_joined=True))
    originals = mask_slots.gather(_joined(input_ids, where), positions)
    is_text = where >= 0
    joined = jnp.where(is_text, _joined(masked.input_ids, where), PAD)
    return Rows(joined, is_text, where, positions, originals)


def _joined(values: jax.Array, where: jax.Array) -> jax.Array:
    """Gathers [B, L] at `where` [R, L], 0 where nothing stands.

    Each group of devices has a group of the plan, and all tokens of it.
    """
    groups = all_reduce.replicas()
    apart = values.reshape(groups, -1)
    at = jnp.where(where < 0, apart.shape[1], where).reshape(groups, -1)
    return mask_slots.gather(apart, at).reshape(where.shape)
