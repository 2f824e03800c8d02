"""Training batches of an ABNet run: the same examples on both sides, each its half.

Both sides compute the same schedule of the length buckets of the source's rows, so a
batch's hidden states have few lengths; the target's rows are as long as they are.

N training examples, B batch, M micro-batches, b = B / M, L source length, Q target
length, P slots for predictions.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from experiments.abnet import config, data
from nebula_jax.data import length_buckets
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.training import abnet as abnet_training


def row_buckets(agreed: config.Agreed, text: data.Text) -> np.ndarray:
    """Returns the length bucket of each training row of a side, [N] uint8."""
    return length_buckets.bucket_of(text.train.lengths, agreed.length_buckets)


def schedule(agreed: config.Agreed, buckets: np.ndarray) -> length_buckets.Schedule:
    """Returns the order of the training examples, the same on both sides.

    Args:
      agreed: of the run.
      buckets: [N] uint8, of the source's rows.
    """
    return length_buckets.Schedule(buckets, agreed.batch_size, agreed.seed)


class Source(NamedTuple):
    """The source side's batches."""

    agreed: config.Agreed
    mesh: Mesh
    """Of the cluster."""
    text: data.Text
    """Of the source side."""
    order: length_buckets.Schedule
    """Of the examples."""
    target_lengths: np.ndarray
    """[N] int32, tokens of each target row; 0 with the objective `ar`."""

    def at(self, step: int) -> tuple[int, Iterator[abnet_training.SourceBatch]]:
        """Makes the batch of a step, counted from 1.

        Returns:
          The number of the batch's bucket, and its M micro-batches ([b, L]), each put
          on the devices when it is due.
        """
        bucket, indices = self.order.batch(step - 1)
        # The length loss is divided by the tokens of the whole batch.
        is_cmlm = self.agreed.objective == "cmlm"
        tokens = np.float32(self.target_lengths[indices].sum() if is_cmlm else 1)
        everywhere = mesh_lib.replicated(self.mesh)
        length = self.agreed.length_buckets[bucket]

        def on_devices(part: np.ndarray) -> abnet_training.SourceBatch:
            here = part[mesh_lib.rows_here(self.mesh, len(part))]
            ids = self.text.train.rows(here, length, self.text.tokenizer.special.pad)
            rows = ids, here, self.target_lengths[here]
            return abnet_training.SourceBatch(
                *mesh_lib.put_rows(self.mesh, rows, len(part)),
                mesh_lib.put(tokens, everywhere),
            )

        parts = length_buckets.micro_batches(indices, self.agreed.micro_batches)
        return bucket, map(on_devices, parts)

    def tokens(self, step: int) -> np.float32:
        """Returns how many tokens the source's rows of a step have."""
        indices = self.order.batch(step - 1).indices
        return np.float32(self.text.train.lengths[indices].sum())


class Target(NamedTuple):
    """The target side's batches; the fields are those of `Source`."""

    agreed: config.Agreed
    mesh: Mesh
    text: data.Text
    order: length_buckets.Schedule

    def at(self, step: int) -> tuple[int, Iterator[abnet_training.TargetBatch]]:
        """Makes the batch of a step; see `Source.at`.

        Returns:
          The number of the batch's bucket, which is that of the source's rows, and its
          M micro-batches ([b, Q], with [P] slots).
        """
        bucket, indices = self.order.batch(step - 1)
        agreed, lengths = self.agreed, self.text.train.lengths
        columns = data.bucket_length(agreed, lengths[indices])
        tokens = np.float32(lengths[indices].sum())
        parts = length_buckets.micro_batches(indices, agreed.micro_batches)
        # All micro-batches have as many slots as the longest needs: one shape.
        longest = max(parts, key=lambda part: lengths[part].sum())
        slots = data.slots(lengths[longest], len(longest), columns, agreed.objective)
        everywhere = mesh_lib.replicated(self.mesh)

        def on_devices(part: np.ndarray) -> abnet_training.TargetBatch:
            here = part[mesh_lib.rows_here(self.mesh, len(part))]
            ids = self.text.train.rows(here, columns, self.text.tokenizer.special.pad)
            return abnet_training.TargetBatch(
                *mesh_lib.put_rows(self.mesh, (ids, here), len(part)),
                *mesh_lib.put((tokens, slots), everywhere),
            )

        return bucket, map(on_devices, parts)
