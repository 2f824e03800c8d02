"""The pairs of an XNLI run: read, tokenized, the vocabulary trimmed to them.

N pairs, B batch, L length, V rows of the table.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from experiments.xnli import config
from nebula_jax import files
from nebula_jax.data import (
    length_buckets,
    nli,
    ragged_rows,
    tokenizers,
)
from nebula_jax.models import pretrained
from nebula_jax.models.pretrained import trimming
from nebula_jax.runtime.life import process


class Part(NamedTuple):
    """The pairs of one split in one language."""

    rows: ragged_rows.TokenRows
    labels: np.ndarray  # [N] int32, places in nli.LABELS


class Text(NamedTuple):
    """The pairs of a run, and a model with their pieces."""

    model: pretrained.Pretrained
    tokenizer: tokenizers.Tokenizer
    keep: np.ndarray  # [V] int32, ascending: rows left of the whole model's table
    parts: dict[str, dict[str, Part]]  # split -> language -> pairs
    digest: str  # identifies the texts as they were read
    length_buckets: tuple[int, ...]

    def buckets(self, part: Part) -> np.ndarray:
        """Returns [N] uint8, the length bucket of each pair."""
        return length_buckets.bucket_of(part.rows.lengths, self.length_buckets)

    def input_ids(self, part: Part, batch: length_buckets.Batch) -> np.ndarray:
        """Returns [B, L] int32, padded to the length of the batch's bucket."""
        length = self.length_buckets[batch.bucket]
        return part.rows.rows(batch.indices, length, self.tokenizer.special.pad)


def read(
    run: config.Run,
    wanted: Mapping[str, Sequence[str]],
    model: pretrained.Pretrained,
    tokenizer: tokenizers.Tokenizer,
) -> Text:
    """Reads and tokenizes splits; reports pairs that were cut or are unknown.

    `wanted` is split -> languages; the tokenizer is the whole model's. Raises
    errors.NebulaError where a file is missing or malformed.
    """
    agreed = run.agreed
    found = {split: _examples(run, split, names) for split, names in wanted.items()}
    is_doubled = ragged_rows.has_double_separator(tokenizer, model.config.token_types)
    separators = 2 if is_doubled else 1
    parts: dict[str, dict[str, Part]] = {}
    for split, by_language in found.items():
        parts[split] = {}
        for language, examples in by_language.items():
            rows = _tokenized(run, split, examples, tokenizer, separators)
            for warning in rows.warnings("pairs"):
                process.message(f"{split}.{language}: {warning}")
            parts[split][language] = Part(rows, examples.labels)
    keep = np.arange(model.config.vocab_size, dtype=np.int32)
    if agreed.trim_vocabulary:
        every = [part.rows for each in parts.values() for part in each.values()]
        whole, counts = tokenizer.size, ragged_rows.count_pieces(every, tokenizer.size)
        model, tokenizer, keep = trimming.trim_to(model, tokenizer, counts)
        process.message(f"{len(keep):,} of {whole:,} pieces are kept")
        parts = {
            split: {
                language: part._replace(rows=ragged_rows.renumber(part.rows, keep))
                for language, part in each.items()
            }
            for split, each in parts.items()
        }
    return Text(
        model=model,
        tokenizer=tokenizer,
        keep=keep,
        parts=parts,
        digest=digest(found),
        length_buckets=agreed.length_buckets,
    )


def _tokenized(
    run: config.Run,
    split: str,
    examples: nli.Examples,
    tokenizer: tokenizers.Tokenizer,
    separators: int,
) -> ragged_rows.TokenRows:
    """Tokenizes pairs, unless that was done before."""
    longest = run.agreed.length_buckets[-1]
    made_from = [ragged_rows.FORMAT, tokenizer.digest, longest, separators]
    made_from += examples[:3]
    name = f"pairs-{split}-L{longest}-{files.digest_of(made_from)}.npz"
    return ragged_rows.cached(
        run.local.prepared_dir / name,
        lambda: ragged_rows.tokenize_pairs(
            *examples[:3], tokenizer, longest, separators=separators
        ),
    )


def _examples(
    run: config.Run, split: str, names: Sequence[str]
) -> dict[str, nli.Examples]:
    """Returns language -> examples."""
    agreed, folder = run.agreed, pathlib.Path(run.local.data_dir)
    paths = nli.paths(folder, split, names)
    found = {name: nli.read(path) for name, path in paths.items()}
    if split == "train" and agreed.max_train_pairs:
        return _drawn(found, agreed.max_train_pairs, agreed.seed)
    most = agreed.max_test_pairs
    if split == "test" and most:
        process.message(
            f"test: at most {most:,} pairs of a language (--max_test_pairs)"
        )
        return _drawn(found, most, seed=0)
    return found


def _drawn(
    found: dict[str, nli.Examples], most: int, seed: int
) -> dict[str, nli.Examples]:
    """Returns at most so many examples of each language, in their order."""
    kept = {}
    for language, examples in found.items():
        drawn = length_buckets.shuffled(len(examples.ids), seed)[:most]
        places = np.sort(drawn).tolist()
        kept[language] = nli.Examples(
            *([column[place] for place in places] for column in examples[:3]),
            examples.labels[places],
        )
    return kept


def digest(found: Mapping[str, Mapping[str, nli.Examples]]) -> str:
    """Returns a short digest of examples."""
    return files.digest_of(
        [
            (split, language, *examples[:3], examples.labels.tolist())
            for split, by_language in found.items()
            for language, examples in by_language.items()
        ]
    )


def describe(text: Text) -> dict[str, dict[str, dict[str, int]]]:
    """Counts the pairs: split -> language -> label -> count."""
    return {
        split: {language: nli.histogram(part.labels) for language, part in each.items()}
        for split, each in text.parts.items()
    }
