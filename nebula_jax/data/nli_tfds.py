"""XNLI as tensorflow_datasets has prepared it, or else of a folder in our format.

    tfds build xnli --file_format=array_record

prepares it (5,010 test rows a language; it has no training pairs). It is read by index
from array_record files, without TensorFlow.

N examples.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nebula_jax import errors, installed
from nebula_jax.data import nli, tfds_local, tsv

with installed.extra("experiments"):
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core import read_only_builder

SPLITS = {"dev": "validation", "test": "test"}
"""Name of a split -> its name in TFDS."""


def present(
    split: str,
    languages: Sequence[str],
    *,
    data_dir: pathlib.Path,
    tfds_dir: pathlib.Path | None = None,
) -> tuple[list[str], list[str]]:
    """Parts languages that `read` would find from those that it would not.

    Args:
      split, languages, data_dir, tfds_dir: as in `read`.

    Returns:
      The languages found, and the others.

    Raises:
      CorpusError: if none is there.
    """
    with tfds_local.quiet():
        builder = _prepared_by_tfds(tfds_dir)
    if not builder:
        return nli.present(data_dir, split, languages)
    known = builder.info.features["premise"].languages
    found = [each for each in languages if each in known]
    if not found:
        raise tsv.CorpusError(f"xnli has no {', '.join(languages)}")
    return found, [each for each in languages if each not in known]


def read(
    split: str,
    languages: Sequence[str],
    *,
    data_dir: pathlib.Path,
    tfds_dir: pathlib.Path | None = None,
) -> tuple[dict[str, nli.Examples], str]:
    """Reads the examples of a split.

    Args:
      split: `dev` or `test`.
      languages: ISO 639-1 codes; all must be there.
      data_dir: a folder in our format, read if TFDS's builder is not prepared.
      tfds_dir: folder of TFDS's files; None for TFDS's default.

    Returns:
      Language -> examples, and the place they are from. TFDS's have no ids: they are
      numbered by their places in its files.

    Raises:
      CorpusError: if neither can be read.
    """
    with tfds_local.quiet():
        builder = _prepared_by_tfds(tfds_dir)
        if not builder:
            paths = {each: nli.path(data_dir, split, each) for each in languages}
            return {each: nli.read(path) for each, path in paths.items()}, str(data_dir)
        where = f"TFDS's xnli in {builder.data_path}"
        try:
            rows = builder.as_data_source(split=SPLITS[split])
            return _columns(rows, languages, split), where
        except (errors.NebulaError, OSError):
            raise
        except Exception as error:  # tfds, protobuf and array_record raise many kinds
            raise _unreadable(where, error) from None


def _prepared_by_tfds(tfds_dir: pathlib.Path | None) -> tfds.core.DatasetBuilder | None:
    """Opens TFDS's builder if its files are there; reading them needs no TFDS code."""
    try:
        return read_only_builder.builder_from_files(
            "xnli", data_dir=tfds_dir and str(tfds_dir)
        )
    except tfds.core.DatasetNotFoundError:
        return None
    except Exception as error:  # its metadata is damaged
        where = f"TFDS's xnli in {tfds_dir or 'its own folder'}"
        raise _unreadable(where, error) from None


def _unreadable(where: str, error: Exception) -> tsv.CorpusError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return tsv.CorpusError(
        f"{where} cannot be read with TFDS ({reason}); its own xnli must be"
        " prepared with --file_format=array_record"
    )


def _columns(
    rows: Sequence[Mapping[str, Any]], languages: Sequence[str], split: str
) -> dict[str, nli.Examples]:
    records = [rows[place] for place in range(len(rows))]
    # TFDS's builder shuffles and keeps no ids: its rows are not the folder's.
    ids = [f"tfds-xnli-{split}-{place:04d}" for place in range(len(rows))]
    missing = set(languages) - set(records[0]["premise"])
    if missing:
        raise tsv.CorpusError(f"xnli has no {', '.join(sorted(missing))}")
    labels = np.asarray([record["label"] for record in records], np.int32)
    hypotheses = [_by_language(record["hypothesis"]) for record in records]
    return {
        language: nli.Examples(
            ids,
            [_text(record["premise"][language]) for record in records],
            [each[language] for each in hypotheses],
            labels,
        )
        for language in languages
    }


def _by_language(record: Mapping[str, Any]) -> dict[str, str]:
    pairs = zip(record["language"], record["translation"], strict=True)
    return {_text(language): _text(text) for language, text in pairs}


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
