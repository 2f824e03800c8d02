"""The pairs of an XNLI run: read, tokenised, the vocabulary cut down to them.

N pairs, V rows of the table.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from experiments import lifecycle, shared_flags
from experiments.xnli import config as xnli_config
from nebula_jax import files
from nebula_jax.data import (
    length_buckets,
    nli,
    nli_tfds,
    ragged_pairs,
    ragged_rows,
    text_folder,
    tokenizers,
)
from nebula_jax.models import pretrained


class Part(NamedTuple):
    """The pairs of one split in one language."""

    rows: ragged_rows.TokenRows
    labels: np.ndarray
    """[N] int32, places in nli.LABELS."""

    @property
    def buckets(self) -> np.ndarray:
        """[N] uint8, the length bucket of each pair."""
        return length_buckets.bucket_of(self.rows.lengths, xnli_config.capacities())


class Text(NamedTuple):
    """All pairs of a run, and a model that knows their pieces."""

    model: pretrained.Pretrained
    words: tokenizers.Tokenizer
    keep: np.ndarray
    """[V] int32, which rows of the whole model's table are left, ascending."""
    parts: dict[str, dict[str, Part]]
    """Split -> language -> pairs."""
    digest: str
    """Of the texts as they were read."""
    sources: dict[str, str]
    """Split -> where its pairs are from."""


def languages(split: str) -> list[str]:
    """Those of --languages that have pairs of a split.

    Raises:
      corpora.CorpusError: if one has none, unless --skip_missing_languages.
    """
    wanted, folder = xnli_config.languages(), xnli_config.data_dir()
    if xnli_config.DATASET.value == "folder":
        there, missing = nli.present(folder, split, wanted)
        where = f"{folder}/nli/{split}.LANGUAGE.tsv[.gz]"
    else:
        there, missing = nli_tfds.present(
            split, wanted, data_dir=folder, tfds_dir=xnli_config.tfds_dir()
        )
        where = xnli_config.DATASET.value
    if missing and not xnli_config.SKIP_MISSING.value:
        raise text_folder.CorpusError(
            f"no {split} pairs in {', '.join(missing)} ({where});"
            " --skip_missing_languages leaves such languages out"
        )
    if missing:
        lifecycle.say(f"no {split} pairs, left out: {', '.join(missing)}")
    return there


def read(
    wanted: Mapping[str, Sequence[str]],
    model: pretrained.Pretrained,
    words: tokenizers.Tokenizer,
) -> Text:
    """Reads and tokenises splits; says what a person should know of them.

    Args:
      wanted: split -> languages.
      model: whole.
      words: its whole tokenizer.

    Raises:
      NebulaError: where a file is missing or malformed.
    """
    found, sources = {}, {}
    for split, names in wanted.items():
        found[split], sources[split] = _examples(split, names)
    separators = (
        2 if ragged_pairs.has_double_separator(words, model.config.token_types) else 1
    )
    parts: dict[str, dict[str, Part]] = {}
    for split, by_language in found.items():
        parts[split] = {}
        for language, examples in by_language.items():
            rows = _tokenised(split, examples, words, separators)
            for remark in rows.warnings("pairs"):
                lifecycle.say(f"{split}.{language}: {remark}")
            parts[split][language] = Part(rows, examples.labels)
    keep = np.arange(model.config.vocab_size, dtype=np.int32)
    if xnli_config.TRIM.value:
        every = [part.rows for each in parts.values() for part in each.values()]
        used = np.flatnonzero(ragged_rows.count_pieces(every, words.size))
        keep = tokenizers.kept_ids(words, used).astype(np.int32)
        lifecycle.say(f"{len(keep):,} of {words.size:,} pieces are kept")
        model, words = pretrained.trim(model, keep), tokenizers.trim(words, keep)
        parts = {
            split: {
                language: part._replace(rows=ragged_rows.renumber(part.rows, keep))
                for language, part in each.items()
            }
            for split, each in parts.items()
        }
    return Text(model, words, keep, parts, digest(found), sources)


def _tokenised(
    split: str, examples: nli.Examples, words: tokenizers.Tokenizer, separators: int
) -> ragged_rows.TokenRows:
    """Tokenises pairs, unless that was done before."""
    longest = xnli_config.capacities()[-1]
    made_from = [ragged_rows.FORMAT, words.digest, longest, separators, *examples[:3]]
    name = f"pairs-{split}-L{longest}-{files.digest_of(made_from)}.npz"
    return ragged_rows.cached(
        pathlib.Path(shared_flags.PREPARED_DIR.value) / name,
        lambda: ragged_pairs.tokenize(
            *examples[:3], words, longest, separators=separators
        ),
    )


def _examples(split: str, names: Sequence[str]) -> tuple[dict[str, nli.Examples], str]:
    """Language -> examples, and where they are from."""
    folder = xnli_config.data_dir()
    if split != "train" and xnli_config.DATASET.value == "tfds:xnli":
        found, where = nli_tfds.read(
            split,
            names,
            data_dir=folder,
            prepared_dir=pathlib.Path(shared_flags.PREPARED_DIR.value),
            tfds_dir=xnli_config.tfds_dir(),
        )
        lifecycle.say(f"{split}: {where}")
    else:
        found = {name: nli.read(nli.path(folder, split, name)) for name in names}
        where = str(folder)
    if split == "train" and xnli_config.MAX_TRAIN_PAIRS.value:
        drawn = _some(found, xnli_config.MAX_TRAIN_PAIRS.value, shared_flags.SEED.value)
        return drawn, where
    most = xnli_config.MAX_TEST_PAIRS.value
    if split == "test" and most:
        lifecycle.say(f"test: at most {most:,} pairs of a language (--max_test_pairs)")
        return _some(found, most, seed=0), where
    return found, where


def _some(
    found: dict[str, nli.Examples], most: int, seed: int
) -> dict[str, nli.Examples]:
    """At most so many examples of each language, drawn by `seed`, in their order."""
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
    """A short digest of examples, however they were read."""
    return files.digest_of(
        [
            (split, language, *examples[:3], examples.labels.tolist())
            for split, by_language in found.items()
            for language, examples in by_language.items()
        ]
    )


def describe(text: Text) -> dict[str, dict[str, dict[str, int]]]:
    """Split -> language -> label -> count."""
    return {
        split: {language: nli.histogram(part.labels) for language, part in each.items()}
        for split, each in text.parts.items()
    }
