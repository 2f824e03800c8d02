"""Packed sequences in array_record files, made once by a builder of TFDS.

They are read by index afterwards (`tfds.data_source` needs no TensorFlow). TFDS takes
a while to import, so who reads no text does not import this. L max_length.
"""

import contextlib
import dataclasses
import fcntl
import pathlib
from collections.abc import Iterator, Sequence

import numpy as np
from absl import logging

from nebula_jax import errors, files, installed
from nebula_jax.data import packed_sequences, text_folder
from nebula_jax.data.tokenizers import vocabulary as vocabularies

with installed.extra("experiments"):
    import tensorflow_datasets as tfds

tfds.disable_progress_bar()
NO_DOWNLOAD = tfds.download.DownloadConfig(try_download_gcs=False)


@dataclasses.dataclass
class PackedTextConfig(tfds.core.BuilderConfig):
    """The files of the splits, and the way they are packed."""

    kind: str = "mono"  # `mono` or `parallel`
    splits: dict[str, str] = dataclasses.field(default_factory=dict)  # name -> path
    vocabulary: str = ""
    max_length: int = 0  # L, tokens of a sequence


class _LocalInfo(tfds.core.DatasetInfo):
    """A dataset's description that TFDS does not look for in its own storage."""

    def initialize_from_bucket(self) -> None:
        """Finds nothing: TFDS's search uses the network, and leaves an empty folder."""


class PackedText(tfds.core.GeneratorBasedBuilder):
    """One file group of a text folder as packed sequences of piece ids."""

    VERSION = tfds.core.Version("1.0.0")  # of the files; for sequences see PACKINGS

    def _info(self) -> _LocalInfo:
        ids = tfds.features.Tensor(shape=(None,), dtype=np.int32)
        return _LocalInfo(
            builder=self,
            features=tfds.features.FeaturesDict({"input_ids": ids}),
            disable_shuffling=True,  # Grain shuffles by index
        )

    def _split_generators(
        self, dl_manager: tfds.download.DownloadManager
    ) -> dict[str, Iterator[tuple[int, dict[str, np.ndarray]]]]:
        del dl_manager  # nothing is downloaded
        config = self.builder_config
        return {
            split: self._generate_examples(path)
            for split, path in config.splits.items()
        }

    def _generate_examples(
        self, path: str
    ) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        config = self.builder_config
        encode = vocabularies.load(pathlib.Path(config.vocabulary)).encode
        file = pathlib.Path(path)
        if config.kind == "mono":
            sentences = (encode(line) for line in text_folder.read_mono(file))
            packed = packed_sequences.pack_mono(sentences, config.max_length)
        else:
            pairs = (
                (encode(one), encode(other))
                for one, other in text_folder.read_parallel(file)
            )
            packed = packed_sequences.pack_pairs(pairs, config.max_length)
        for index, ids in enumerate(packed):
            yield index, {"input_ids": np.asarray(ids, np.int32)}


def prepare(
    data_dir: pathlib.Path,
    kind: str,
    language: str,
    splits: Sequence[str],
    vocabulary: vocabularies.Vocabulary,
    max_length: int,
    prepared_dir: pathlib.Path,
) -> packed_sequences.Prepared:
    """Packs a part of a text folder unless that was done before, and opens it.

    The folder in `prepared_dir` is named by a digest of the texts, the vocabulary, L
    and the way they are packed: an edited corpus is prepared anew, never mixed up.
    `kind` is `mono`, or `parallel`, for which `language` is a pair such as `en-sw`.
    Raises CorpusError if a text file is missing or malformed, the disk is full, or an
    earlier folder is damaged.
    """
    find = text_folder.mono_path if kind == "mono" else text_folder.parallel_path
    paths = {split: find(data_dir, language, split) for split in splits}
    texts = [(split, files.digest(path)) for split, path in paths.items()]
    key = files.digest_of([vocabulary.digest, *texts, *packed_sequences.PACKINGS[kind]])
    name = f"{kind}-{language}-L{max_length}-{key}"
    with _quiet(), _locked(prepared_dir):
        try:
            builder = PackedText(
                config=PackedTextConfig(
                    name=name,
                    kind=kind,
                    splits={split: str(path) for split, path in paths.items()},
                    vocabulary=str(vocabulary.path),
                    max_length=max_length,
                ),
                data_dir=str(prepared_dir),
                file_format="array_record",
            )
            builder.download_and_prepare(download_config=NO_DOWNLOAD)
            sources = {split: builder.as_data_source(split=split) for split in splits}
            for source in sources.values():
                if len(source):
                    source[len(source) - 1]  # a cut file shows at its end
        except (errors.NebulaError, OSError):
            raise
        except Exception as error:  # tfds, protobuf and array_record raise many kinds
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            folder = prepared_dir / "packed_text" / name
            raise text_folder.CorpusError(
                f"{folder} cannot be made or read ({reason}); remove it and try again"
            ) from None
    return packed_sequences.Prepared(key, sources)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences TFDS's banners; the callers report progress."""
    before = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        with contextlib.redirect_stdout(None):
            yield
    finally:
        logging.set_verbosity(before)


@contextlib.contextmanager
def _locked(prepared_dir: pathlib.Path) -> Iterator[None]:
    """Keeps two generators on one machine from preparing a folder at once."""
    prepared_dir.mkdir(parents=True, exist_ok=True)
    with (prepared_dir / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
