"""Training batches of an ABNet run: the same examples on both sides, each its half.

Both sides compute the same schedule of the length buckets of the source's rows, so a
batch's hidden states have few lengths; the target's rows are as long as they are.

N training examples, B batch, M micro-batches, b = B / M, L source length, Q target
length, P slots for predictions.
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


def schedule(agreed: config.Agreed, buckets: np.ndarray) -> length_buckets.Schedule:
    """Returns which examples make up each batch.

    Args:
      agreed: of the run.
      buckets: [N] uint8, of the source's rows.
    """
    return length_buckets.Schedule(buckets, agreed.batch_size, agreed.seed)


def source_batch(
    agreed: config.Agreed,
    mesh: Mesh,
    text: data.Text,
    order: length_buckets.Schedule,
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
    tokens = np.float32(target_lengths[indices].sum() if is_cmlm else 1)
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
    order: length_buckets.Schedule,
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
    tokens = np.float32(lengths[indices].sum())
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
