"""The text of a pre-training run: where it is, its stream, what is held out.

B rows of a batch, L length.
"""

import collections
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments import configuration
from experiments.pretraining import config
from nebula_jax import errors, files
from nebula_jax.communication.wire import activity
from nebula_jax.data import (
    django_messages,
    language_mixture,
    packed_sequences,
    resumable_batches,
    text_folder,
)
from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.runtime.life import process
from nebula_jax.runtime.served import data_channels, remote_text

HELD_OUT_SEED = 1_000_003
ALL = "all"


class Reader(NamedTuple):
    """A reader of a run's text: its part of it, and how it reads."""

    cluster: str  # its name for who serves the text
    languages: list[str]
    mix: language_mixture.TaskWeights
    seed: int
    rows: int  # rows that it reads of a batch
    held_out_rows: int  # B of a held-out batch
    ahead: int  # batches that it may have to train on once it has requested the end
    most: int | None  # batches of the whole run; None if that is not determined


def folder(local: configuration.Place) -> pathlib.Path:
    """Returns --data_dir, after writing out Django's messages if those are wanted.

    Raises errors.SettingsError if it names an unknown package.
    """
    if not local.data_dir.startswith("package:"):
        return pathlib.Path(local.data_dir)
    if local.data_dir != "package:django":
        raise errors.SettingsError(
            f"--data_dir={local.data_dir}: the only package is package:django"
        )
    made = written(local)
    if not (made / "mono" / "families.json").is_file():  # written last
        with process.timed("writing Django's messages as a text folder"):
            django_messages.write_text_folder(made)
    return made


def written(local: configuration.Place) -> pathlib.Path:
    """Returns the folder of a package's text, which is there once `folder` made it."""
    return local.prepared_dir / "django_messages"


def parsed(languages: Sequence[str]) -> list[list[str]]:
    """Parses --languages: groups, one for every cluster or one for each."""
    return language_mixture.parse_groups(" ".join(languages), "languages", "cluster")


def groups(languages: Sequence[str], local: config.Local) -> list[list[str]]:
    """Returns the groups of --languages, `all` looked up in the text folder.

    Raises errors.NebulaError if they are no groups, or there is nothing to look up in.
    """
    if [each.strip() for each in languages] != [ALL]:
        return parsed(languages)
    if local.data:
        raise errors.SettingsError(
            f"--languages={ALL}: with --data there is no text folder to look this up"
            ' in; write them out, as in --languages="en de"'
        )
    return [text_folder.languages(folder(local))]


def seed_of(seed: int, stream: int) -> int:
    """Returns the seed of a stream, by the seed of the run and its number in it."""
    return seed + 1000 * (stream + 1)  # so no two streams shuffle two sources alike


class Text:
    """The text of one reader: an endless stream to train on, and held-out lines.

    With --data it is read from who serves it, until the text is closed.
    """

    def __init__(
        self,
        agreed: config.Agreed,
        local: config.Local,
        reader: Reader,
        vocabulary: vocabularies.Vocabulary,
        work: activity.Work | None = None,
    ) -> None:
        """Prepares the text, or raises errors.NebulaError; `work` is for --data."""
        self._agreed, self._reader = agreed, reader
        self._remote: remote_text.RemoteText | None = None
        if local.data:
            data = self._served(local, vocabulary, work)
        else:
            data = language_mixture.open_generator(
                folder(local),
                reader.languages,
                reader.mix,
                _exponents(local),
                vocabulary=vocabulary,
                max_length=agreed.max_length,
                prepared_dir=local.prepared_dir,
                pairs=agreed.parallel_pairs,
            )
        self._held_out = data.held_out
        if not local.data:  # else who serves it has checked: a grant pays for each row
            language_mixture.check_known(data.held_out, process.message)
        self.key = files.digest_of(
            [(source.name, source.key, source.weight) for source in data.sources]
        )
        """Digest of the text to train on and its mixture."""
        self._sources = data.sources
        self.batches: Any = None  # endless [rows, L] int32, once they are begun

    def _served(
        self,
        local: config.Local,
        vocabulary: vocabularies.Vocabulary,
        work: activity.Work | None,
    ) -> language_mixture.GeneratorData:
        """Opens the text that another process serves; for the arguments see above."""
        agreed, reader = self._agreed, self._reader
        remote = remote_text.RemoteText(
            local.connection(),
            data_channels.parse(local.data),
            reader.cluster,
            vocabulary.digest,
            data_channels.Form(reader.rows, agreed.max_length, vocabulary.size),
            work,
        )
        self._remote = remote

        def opened(
            kind: str, language: str, splits: Sequence[str]
        ) -> packed_sequences.Prepared:
            part = remote.part(f"{kind}/{language}", splits)
            return packed_sequences.Prepared(*part)

        data = language_mixture.mixture(
            reader.languages,
            reader.mix,
            _exponents(local),
            opened,
            agreed.parallel_pairs,
        )
        # Every evaluation reads these rows, and a grant counts every row that is read.
        rows = agreed.eval_batches * reader.held_out_rows
        held_out = {name: text[:rows] for name, text in data.held_out.items()}
        return data._replace(held_out=held_out)

    def __enter__(self) -> "Text":
        return self

    def __exit__(self, *exception: object) -> None:
        """Ends the session with who serves the text."""
        if self._remote is not None:
            self._remote.close()

    @property
    def languages(self) -> list[str]:
        """The languages of the reader."""
        return self._reader.languages

    @property
    def end(self) -> errors.NebulaError | None:
        """The reason why the text ends before the run; None while it does not."""
        return None if self._remote is None else self.batches.end

    def position(self) -> Any:
        """Returns where the stream is, and in which text, as JSON values."""
        return {"text": self.key, "stream": self.batches.get_state()}

    def begin(self, position: Any, batch_size: int, rows: slice = slice(None)) -> None:
        """Begins the stream of batches at a saved position; None is its beginning.

        `rows` are those of every batch that this process trains on. Text that is served
        elsewhere may end at any batch. So those that this cluster may have to train on
        after it has requested the end are read before. Raises errors.NebulaError if the
        text or its mixture is not what it was, or text served elsewhere ends already.
        """
        remote = self._remote
        more: dict[str, Any] = {}
        if remote is not None:  # a grant pays for each row: none that is not needed
            more = {"fetch": remote.fetch, "most": self._reader.most}
        length, seed = self._agreed.max_length, self._reader.seed
        numbered = resumable_batches.numbered(
            self._sources, batch_size, length, seed, rows, **more
        )
        self.batches = resumable_batches.training_batches(numbered)
        if remote is not None:
            self.batches = resumable_batches.ReadAhead(self.batches, self._reader.ahead)
        if position is not None:
            if position["text"] != self.key:
                raise errors.NebulaError(
                    f"the text of {' '.join(self.languages)}, the way it is packed, or"
                    " its --mono_alpha or --parallel_alpha changed since the"
                    " checkpoint; put it back, or name another --workdir"
                )
            self.batches.set_state(position["stream"])
        if remote is not None:
            self.batches.begin()

    def held_out(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields (language, [B, L] int32) in the order of `held_out_order`."""
        parts = {
            language: resumable_batches.held_out_batches(
                self._held_out[language],
                self._agreed.eval_batches,
                self._reader.held_out_rows,
                self._agreed.max_length,
            )
            for language in self.languages
        }
        for language, part in held_out_order(self._agreed, self.languages):
            yield language, parts[language][part]


def _exponents(local: config.Local) -> language_mixture.SamplingExponents:
    return language_mixture.SamplingExponents(local.mono_alpha, local.parallel_alpha)


def held_out_order(
    agreed: config.Agreed, languages: list[str]
) -> list[tuple[str, int]]:
    """Returns (language, batch) of a reader's held-out batches, as it yields them."""
    batches = range(agreed.eval_batches)
    return [(language, batch) for language in languages for batch in batches]


def held_out_rng(micro_batch: int) -> jax.Array:
    """Returns a key: held-out text is masked alike at every evaluation.

    Also in another run, if its languages are in the same groups and as many batches are
    held out.
    """
    return jax.random.key(HELD_OUT_SEED + micro_batch)


def masked_lm_figures(
    held_out: Iterable[tuple[str, np.ndarray]],
    evaluate: Callable[[jax.Array, np.ndarray], Iterable[jax.Array]],
) -> dict[str, dict[str, float]]:
    """Evaluates a masked language model on held-out text, masked alike every time.

    `evaluate` is (key of the masks, batch [B, L] int32) -> `bert.Sums`. Returns
    language -> `mlm_loss` in nats a masked token, and `mlm_accuracy`.
    """
    sums: dict[str, np.ndarray] = collections.defaultdict(lambda: np.zeros(3))
    for number, (language, batch) in enumerate(held_out):
        found = evaluate(held_out_rng(number), batch)
        sums[language] += np.asarray(jax.device_get(tuple(found)))
    return {
        language: {"mlm_loss": loss / masked, "mlm_accuracy": correct / masked}
        for language, (loss, masked, correct) in sums.items()
    }
