"""The text of an ABNet run: each cluster's own side, and its batches.

Both sides compute the same schedule of the length buckets of the source's rows, so a
batch's hidden states have few lengths; the target's rows are as long as they are.

N examples of a split, B batch, M micro-batches, b = B / M, L source length, Q target
length, P slots for predictions.
"""

import hmac
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from experiments.abnet import config
from nebula_jax import errors, files
from nebula_jax.communication import bridge
from nebula_jax.communication.wire import frames
from nebula_jax.data import (
    example_alignment,
    length_buckets,
    parallel_side,
    ragged_rows,
    split_parallel,
    tokenizers,
)
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.runtime.life import process
from nebula_jax.training import abnet as abnet_training


class Text(NamedTuple):
    """One side of the corpus, tokenized."""

    tokenizer: tokenizers.Tokenizer
    ids: dict[str, list[str]]  # split -> ids of its examples, in order
    rows: Mapping[str, ragged_rows.TokenRows]
    """Split -> its sentences, [CLS] and [SEP] included, in the order of their ids: of
    the target side those of training and those held out, of the source side all."""
    sentences: dict[str, list[str]]  # split -> its sentences as text; none of training

    @property
    def train(self) -> ragged_rows.TokenRows:
        """The training sentences."""
        return self.rows["train"]


def split(
    run: config.Run, out: pathlib.Path | None = None
) -> tuple[pathlib.Path, pathlib.Path]:
    """Makes both sides of --data_dir, a language each, in `out` or --prepared_dir."""
    pair, local = run.agreed.pair, run.local
    chosen = local.corpora, local.max_pairs, local.max_words, local.held_out_pairs
    made_of = [pair, local.data_dir, *chosen]
    name = f"{pair}-{files.digest_of(made_of)[:16]}"
    with process.timed("giving each side its own text"):
        return split_parallel.split(
            local.data_dir,
            config.languages(pair),
            out or local.prepared_dir / "sides" / name,
            local.corpora or None,
            local.max_pairs,
            local.max_words,
            local.held_out_pairs,
        )


def read(
    run: config.Run,
    folder: pathlib.Path,
    tokenizer: tokenizers.Tokenizer,
    *,
    is_translated: bool,
) -> Text:
    """Reads and tokenizes a side; reports sentences that were cut or are unknown.

    With `is_translated` the model reads dev and the tests too. Otherwise they are
    references, which translations are compared with. Held-out sentences, whose loss is
    computed, it reads on both sides. Raises errors.NebulaError where the text is
    malformed, or a sentence is too long.
    """
    ids, sentences = {}, {}
    rows: dict[str, ragged_rows.TokenRows] = {}
    for name in parallel_side.splits(folder):
        file = parallel_side.path(folder, name)
        if name != "train":
            ids[name], sentences[name] = parallel_side.read(file)
            if not is_translated and name != split_parallel.HELD_OUT:
                continue
        try:
            rows[name] = ragged_rows.prepare(
                file,
                tokenizer,
                run.agreed.length_buckets[-1],
                # What is only translated may be cut: training text is chosen.
                truncate=run.local.truncate or name != "train",
                prepared_dir=run.local.prepared_dir,
            )
        except ragged_rows.TokenError as error:
            raise errors.SettingsError(
                f"{file}: {error}; --truncate cuts, and a longer last one of"
                " --length_buckets allows more"
            ) from error
        for remark in rows[name].warnings():
            process.message(f"{file}: {remark}")
        ids[name] = rows[name].ids
    return Text(tokenizer, ids, rows, sentences)


def id_key(run: config.Run) -> bytes:
    """Returns the key under which ids and fingerprints are compared.

    Raises errors.SettingsError if --id_key is an empty file.
    """
    if not run.local.id_key:
        return example_alignment.default_key(run.agreed.pair, str(run.agreed.seed))
    key = pathlib.Path(run.local.id_key).read_bytes()
    if not key:
        raise errors.SettingsError(f"--id_key={run.local.id_key}: the file is empty")
    return key


def check_same_examples(run: config.Run, text: Text, peer: frames.Hello) -> None:
    """Raises bridge.Mismatch, which names some, if the peer has other examples."""
    apart = example_alignment.differences(
        text.ids, id_key(run), peer.details.get("examples")
    )
    if apart:
        raise bridge.Mismatch(
            f"{run.local.cluster} and {peer.cluster} do not hold the same examples:"
            f" {'; '.join(apart)}"
        )


def digest(run: config.Run, text: Text) -> str:
    """Returns a keyed digest of the training examples as the model reads them."""
    found = hmac.new(id_key(run), "\n".join(text.train.ids).encode(), "sha256")
    for array in (text.train.offsets, text.train.tokens):
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()[:12]


def bucket_length(agreed: config.Agreed, lengths: np.ndarray) -> int:
    """Returns the smallest of --length_buckets that holds rows of these lengths."""
    longest = lengths.max(initial=0)
    return next(length for length in agreed.length_buckets if length >= longest)


def slots(lengths: np.ndarray, rows: int, columns: int, objective: str) -> np.ndarray:
    """Makes room, [P] int8 zeros, for the predictions of a target micro-batch.

    The `lengths`, [rows] integers, are tokens of the longest micro-batch's rows, which
    are padded to `columns`. P is one of a few, so that jit compiles a handful of
    shapes: a quarter of the batch's places, half of them, and so on. With `cmlm` the
    masks of a row's n pieces are U{1..n}, drawn on the device: those beyond four
    standard deviations above the mean of their sum are dropped, and counted.
    """
    needed = int(lengths.sum()) - len(lengths)  # all but [CLS]
    if objective == "cmlm":
        pieces = np.maximum(lengths.astype(np.int64) - 2, 1)
        most = np.sum(pieces + 1) / 2 + 4 * np.sqrt(np.sum(pieces**2 - 1) / 12)
        needed = int(min(np.ceil(most), pieces.sum()))
    quarter = -(-rows * columns // 4)
    return np.zeros(min(4, -(-needed // quarter)) * quarter, np.int8)


def row_buckets(agreed: config.Agreed, text: Text) -> np.ndarray:
    """Returns the length bucket of each training row of a side, [N] uint8."""
    return length_buckets.bucket_of(text.train.lengths, agreed.length_buckets)


def schedule(agreed: config.Agreed, buckets: np.ndarray) -> length_buckets.Schedule:
    """Orders examples, alike on both sides, by the source rows' buckets, [N] uint8."""
    return length_buckets.Schedule(buckets, agreed.batch_size, agreed.seed)


class SourceBatches(NamedTuple):
    """The source side's batches."""

    agreed: config.Agreed
    mesh: Mesh
    text: Text
    order: length_buckets.Schedule
    target_lengths: np.ndarray  # [N] int32, tokens of each target row; 0 with `ar`

    def at(self, step: int) -> tuple[int, Iterator[abnet_training.SourceBatch]]:
        """Makes the batch of a step, counted from 1.

        Returns the number of the batch's bucket, and its M micro-batches ([b, L]), each
        put on the devices when it is due.
        """
        bucket, indices, _ = self.order.batch(step - 1)
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

        parts = indices.reshape(self.agreed.micro_batches, -1)
        return bucket, map(on_devices, parts)

    def tokens(self, step: int) -> np.float32:
        """Returns how many tokens the source's rows of a step have."""
        indices = self.order.batch(step - 1).indices
        return np.float32(self.text.train.lengths[indices].sum())


class TargetBatches(NamedTuple):
    """The target side's batches; the fields are those of `SourceBatches`."""

    agreed: config.Agreed
    mesh: Mesh
    text: Text
    order: length_buckets.Schedule

    def at(self, step: int) -> tuple[int, Iterator[abnet_training.TargetBatch]]:
        """Makes the batch of a step; see `SourceBatches.at`.

        The bucket is of the source's rows; micro-batches are [b, Q], with [P] slots.
        """
        bucket, indices, _ = self.order.batch(step - 1)
        agreed, lengths = self.agreed, self.text.train.lengths
        columns = bucket_length(agreed, lengths[indices])
        tokens = np.float32(lengths[indices].sum())
        parts = indices.reshape(agreed.micro_batches, -1)
        # All micro-batches have as many slots as the longest needs: one shape.
        longest = max(parts, key=lambda part: lengths[part].sum())
        room = slots(lengths[longest], len(longest), columns, agreed.objective)
        everywhere = mesh_lib.replicated(self.mesh)

        def on_devices(part: np.ndarray) -> abnet_training.TargetBatch:
            here = part[mesh_lib.rows_here(self.mesh, len(part))]
            ids = self.text.train.rows(here, columns, self.text.tokenizer.special.pad)
            return abnet_training.TargetBatch(
                *mesh_lib.put_rows(self.mesh, (ids, here), len(part)),
                *mesh_lib.put((tokens, room), everywhere),
            )

        return bucket, map(on_devices, parts)


def evaluation_indices(agreed: config.Agreed, name: str, total: int) -> np.ndarray:
    """Returns which examples of a split are translated for a BLEU, [<= total] int64."""
    if name == split_parallel.HELD_OUT:  # all of these
        return np.arange(total)
    return np.arange(total)[: agreed.bleu_sentences]


def evaluation_batches(
    agreed: config.Agreed, rows: ragged_rows.TokenRows, indices: np.ndarray
) -> Sequence[length_buckets.Batch]:
    """Makes batches, of places in `indices`, with examples of similar length together.

    The source side makes them; the target side needs no more than what crosses.
    """
    lengths = rows.lengths[indices]
    buckets = length_buckets.bucket_of(lengths, agreed.length_buckets)
    return length_buckets.evaluation_batches(buckets, agreed.batch_size, lengths)


def describe(text: Text) -> dict[str, Any]:
    """Returns what a summary has of the text."""
    return {
        name: {"sentences": len(rows), "tokens": int(rows.lengths.sum())}
        for name, rows in text.rows.items()
    }
