"""XNLI read with tensorflow_datasets: its builder where prepared, else ours.

    tfds build xnli --file_format=array_record

prepares TFDS's (5,010 test rows a language; it has no training pairs). The other one
has the same features and an id, and reads a folder in our format as its
`manual_dir`. Both are read by index from array_record files, without TensorFlow.

N examples.
"""

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from tensorflow_datasets.core import read_only_builder

from nebula_jax import errors, files
from nebula_jax.data import nli, tfds_local, tsv

SPLITS = {"dev": "validation", "test": "test"}
"""Name of a split -> its name in TFDS."""


@dataclasses.dataclass
class NliFolderConfig(tfds.core.BuilderConfig):
    """The files of a dataset; `name` is a digest of them."""

    split: str = ""
    """One of SPLITS."""
    languages: tuple[str, ...] = ()
    """Languages that have a file."""


class NliFolder(tfds.core.GeneratorBasedBuilder):
    """One split of a folder's `nli/`, with the features of TFDS's `xnli`, and ids."""

    VERSION = tfds.core.Version("1.0.0")
    MANUAL_DOWNLOAD_INSTRUCTIONS = "manual_dir is a folder in the format of data/nli.py"

    def _info(self) -> tfds_local.LocalInfo:
        languages = self.builder_config.languages
        return tfds_local.LocalInfo(
            builder=self,
            features=tfds.features.FeaturesDict(
                {
                    "id": tfds.features.Text(),
                    "premise": tfds.features.Translation(languages=languages),
                    "hypothesis": tfds.features.TranslationVariableLanguages(
                        languages=languages
                    ),
                    "label": tfds.features.ClassLabel(names=list(nli.LABELS)),
                }
            ),
            disable_shuffling=True,
        )

    def _split_generators(
        self, dl_manager: tfds.download.DownloadManager
    ) -> dict[str, Iterator[tuple[int, dict[str, Any]]]]:
        folder = pathlib.Path(dl_manager.manual_dir)
        return {SPLITS[self.builder_config.split]: self._generate_examples(folder)}

    def _generate_examples(
        self, folder: pathlib.Path
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        config = self.builder_config
        pairs = {
            language: _by_id(nli.path(folder, config.split, language))
            for language in config.languages
        }
        first = config.languages[0]
        for language in config.languages:
            differing = pairs[language].keys() ^ pairs[first].keys()
            differing |= {
                name
                for name in pairs[language].keys() & pairs[first].keys()
                if pairs[language][name][2] != pairs[first][name][2]
            }
            if differing:
                path = nli.path(folder, config.split, language)
                raise tsv.CorpusError(
                    f"{path}: {len(differing)} examples are not those of {first}, such"
                    f" as {min(differing)!r}; read the folder without"
                    " dataset=tfds:xnli"
                )
        for index, (name, (_, _, label)) in enumerate(pairs[first].items()):
            yield (
                index,
                {
                    "id": name,
                    "premise": {each: pairs[each][name][0] for each in pairs},
                    "hypothesis": {each: pairs[each][name][1] for each in pairs},
                    "label": label,
                },
            )


def _by_id(file: pathlib.Path) -> dict[str, tuple[str, str, int]]:
    examples = nli.read(file)
    rows = zip(
        examples.premises, examples.hypotheses, examples.labels.tolist(), strict=True
    )
    return dict(zip(examples.ids, rows, strict=True))


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
    prepared_dir: pathlib.Path,
    tfds_dir: pathlib.Path | None = None,
) -> tuple[dict[str, nli.Examples], str]:
    """Reads the examples of a split.

    Args:
      split: `dev` or `test`.
      languages: ISO 639-1 codes; all must be there.
      data_dir: a folder in our format, read if TFDS's builder is not prepared.
      prepared_dir: gets our builder's files.
      tfds_dir: folder of TFDS's files; None for TFDS's default.

    Returns:
      Language -> examples, and the place they are from. TFDS's have no ids: they are
      numbered by their places in its files.

    Raises:
      CorpusError: if neither can be read.
    """
    with tfds_local.quiet():
        builder = _prepared_by_tfds(tfds_dir)
        where = f"TFDS's xnli in {builder.data_path}" if builder else str(data_dir)
        try:
            if not builder:
                builder = _build(split, languages, data_dir, prepared_dir)
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


def _build(
    split: str,
    languages: Sequence[str],
    data_dir: pathlib.Path,
    prepared_dir: pathlib.Path,
) -> NliFolder:
    paths = [nli.path(data_dir, split, language) for language in languages]
    key = files.digest_of([list(languages), *map(files.digest, paths)])
    builder = NliFolder(
        config=NliFolderConfig(
            name=f"{split}-{key}", split=split, languages=tuple(languages)
        ),
        data_dir=str(prepared_dir),
        file_format="array_record",
    )
    builder.download_and_prepare(
        download_config=tfds.download.DownloadConfig(
            manual_dir=str(data_dir), try_download_gcs=False
        )
    )
    return builder


def _columns(
    rows: Sequence[Mapping[str, Any]], languages: Sequence[str], split: str
) -> dict[str, nli.Examples]:
    records = [rows[place] for place in range(len(rows))]
    ids = [
        # TFDS's builder shuffles and keeps no ids: its rows are not the folder's.
        _text(record["id"]) if "id" in record else f"tfds-xnli-{split}-{place:04d}"
        for place, record in enumerate(records)
    ]
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
