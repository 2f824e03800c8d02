"""Training batches of an ABNet run: the same examples on both sides, each its half.

Both sides compute the same schedule of the length buckets of the source's rows, so a
batch's hidden states have few lengths; the target's rows are as long as they are.

With several pairs it is a schedule of joint batches, of which each pair takes its own
part. A pair's loss is divided by the mean of the pairs' tokens, not by its own: so the
mean of the pairs' gradients is the gradient of the joint batch.

N training examples, B batch, M micro-batches, b = B / M, L source length, Q target
length, P slots for predictions, R pairs.
"""

from collections.abc import Iterator

import numpy as np
from jax.sharding import Mesh

from experiments.abnet import config, data
from nebula_jax.data import length_buckets
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.training import abnet as abnet_training


def row_buckets(agreed: config.Agreed, text: data.Text) -> np.ndarray:
    """Returns the length bucket of each training row of a side, [N] uint8."""
    return length_buckets.bucket_of(text.train.lengths, agreed.length_buckets)


class Schedule(length_buckets.Schedule):
    """The batches of one pair: its share of the joint batch of all."""

    def __init__(
        self, agreed: config.Agreed, buckets: np.ndarray, replica: int = 0
    ) -> None:
        """Prepares the order; no epoch is shuffled yet.

        Args:
          agreed: of the run.
          buckets: [N] uint8, of the source's rows.
          replica: number of the pair.

        Raises:
          length_buckets.ScheduleError: if there are fewer than R B examples.
        """
        rows, self._replicas = agreed.batch_size, agreed.replicas
        super().__init__(buckets, rows * agreed.replicas, agreed.seed)
        self._share = slice(rows * replica, rows * (replica + 1))

    def batch(self, step: int) -> length_buckets.Batch:
        """Returns this pair's examples of step `step`, counted from 0: [B] of them."""
        joint = super().batch(step)
        return joint._replace(indices=joint.indices[self._share])

    def tokens(self, step: int, lengths: np.ndarray) -> np.float32:
        """Returns the mean of the pairs' tokens in step `step`, counted from 0.

        Args:
          step: counted from 0.
          lengths: [N] int32, tokens of each row.
        """
        joint = super().batch(step)
        return np.float32(lengths[joint.indices].sum() / self._replicas)


def source_batch(
    agreed: config.Agreed,
    mesh: Mesh,
    text: data.Text,
    order: Schedule,
    target_lengths: np.ndarray,
    step: int,
) -> tuple[int, Iterator[abnet_training.SourceBatch]]:
    """Makes the source side's batch of a step.

    Args:
      agreed: of the run.
      mesh: of the cluster.
      text: of the source side.
      order: of the examples.
      target_lengths: [N] int32, tokens of each target row; 0 with the objective `ar`.
      step: counted from 1.

    Returns:
      The number of the batch's bucket, and its M micro-batches ([b, L]), each put on
      the devices when it is due.
    """
    bucket, indices = order.batch(step - 1)
    is_cmlm = agreed.objective == "cmlm"
    tokens = order.tokens(step - 1, target_lengths) if is_cmlm else np.float32(1)
    everywhere = mesh_lib.replicated(mesh)
    length, pad = agreed.length_buckets[bucket], text.tokenizer.special.pad

    def on_devices(part: np.ndarray) -> abnet_training.SourceBatch:
        here = part[mesh_lib.rows_here(mesh, len(part))]
        rows = text.train.rows(here, length, pad), here, target_lengths[here]
        return abnet_training.SourceBatch(
            *mesh_lib.put_rows(mesh, rows, len(part)),
            mesh_lib.put(tokens, everywhere),
        )

    parts = length_buckets.micro_batches(indices, agreed.micro_batches)
    return bucket, map(on_devices, parts)


def target_batch(
    agreed: config.Agreed,
    mesh: Mesh,
    text: data.Text,
    order: Schedule,
    step: int,
) -> tuple[int, Iterator[abnet_training.TargetBatch]]:
    """Makes the target side's batch of a step; see `source_batch`.

    Returns:
      The number of the batch's bucket, which is that of the source's rows, and its M
      micro-batches ([b, Q], with [P] slots).
    """
    bucket, indices = order.batch(step - 1)
    lengths = text.train.lengths
    columns = data.bucket_length(agreed, lengths[indices])
    tokens = order.tokens(step - 1, lengths)
    parts = length_buckets.micro_batches(indices, agreed.micro_batches)
    longest = max(parts, key=lambda part: lengths[part].sum())
    slots = data.slots(lengths[longest], len(longest), columns, agreed.objective)
    everywhere = mesh_lib.replicated(mesh)
    pad = text.tokenizer.special.pad

    def on_devices(part: np.ndarray) -> abnet_training.TargetBatch:
        here = part[mesh_lib.rows_here(mesh, len(part))]
        rows = text.train.rows(here, columns, pad), here
        return abnet_training.TargetBatch(
            *mesh_lib.put_rows(mesh, rows, len(part)),
            *mesh_lib.put((tokens, slots), everywhere),
        )

    return bucket, map(on_devices, parts)
