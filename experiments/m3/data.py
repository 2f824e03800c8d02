"""The text of an M3 run: whose it is, the vocabulary, what is held out.

B batch, L length.
"""

import pathlib
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from experiments import command_line
from experiments.m3 import config
from nebula_jax import errors, files
from nebula_jax.communication.wire import activity
from nebula_jax.data import (
    django_messages,
    language_mixture,
    packed_sequences,
    read_ahead,
    resumable_batches,
    text_folder,
    tokenizers,
)
from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.runtime import data_channels, process, remote_text

HELD_OUT_SEED = 1_000_003


def folder(local: config.Local) -> pathlib.Path:
    """Returns --data_dir, after writing out Django's messages if those are wanted.

    Raises:
      errors.SettingsError: if it names an unknown package.
    """
    if not local.data_dir.startswith("package:"):
        return pathlib.Path(local.data_dir)
    if local.data_dir != "package:django":
        raise errors.SettingsError(
            f"--data_dir={local.data_dir}: the only package is package:django"
        )
    written = local.prepared_dir / "django_messages"
    if not (written / "mono" / "families.json").is_file():  # written last
        with process.timed("writing Django's messages as a text folder"):
            django_messages.write_text_folder(written)
    return written


def without_text(run: config.Run) -> config.Run:
    """Returns the run of a process that has no text here to look groups up in.

    Raises:
      errors.NebulaError: if the languages of each generator are not written out.
    """
    generators = run.agreed.generators.strip()
    if command_line.whole_number(generators) is not None:
        raise errors.SettingsError(
            f"--generators={generators}: {_who(run.local)} no text folder to look"
            ' this up in; write the groups out, as in --generators="en de|hi ur"'
        )
    groups = run.agreed.groups()
    language_mixture.parse_tasks(run.agreed.task_mix, groups)
    return config.with_groups(run, groups)


def _who(local: config.Local) -> str:
    return "with --data there is" if local.data else "the discriminator has"


def checked(run: config.Run, only: int | None = None) -> config.Run:
    """Returns the run with --generators written out, checked against its text.

    Args:
      run: of this process.
      only: the one generator whose text has to be here; None for all of them.

    Raises:
      errors.NebulaError: at what cannot be. Text that is served elsewhere is checked
        there, when the generator comes.
    """
    if run.local.data:
        run = without_text(run)
        _check_number(run.agreed.groups(), only)
        return run
    text, generators = folder(run.local), run.agreed.generators.strip()
    text_folder.check_folder(text)
    count = command_line.whole_number(generators)
    groups = (
        language_mixture.parse_groups(generators)
        if count is None
        else text_folder.families(text, count)
    )
    mixes = language_mixture.parse_tasks(run.agreed.task_mix, groups)
    here = slice(None) if only is None else slice(only, only + 1)
    _check_number(groups, only)
    language_mixture.check_text(text, groups[here], mixes[here])
    return config.with_groups(run, groups)


def _check_number(groups: list[list[str]], only: int | None) -> None:
    """Raises errors.SettingsError if there is no generator of this number."""
    if only is not None and only >= len(groups):
        raise errors.SettingsError(
            f"--cluster=generator:{only}: --generators has {len(groups)}, from 0"
        )


def shared_vocabulary(run: config.Run) -> pathlib.Path:
    """Returns --vocabulary, or one made of all of the run's text (once per text).

    Before it is made, every line of the text is checked.
    """
    agreed, local, groups = run.agreed, run.local, run.agreed.groups()
    if local.vocabulary:
        return pathlib.Path(local.vocabulary)
    if local.data:
        raise errors.SettingsError(
            f"--data={local.data} needs --vocabulary, the file that its owner has"
            " registered it with"
        )
    text = folder(local)
    digests = [
        files.digest(text_folder.mono_path(text, language, "train"))
        for group in groups
        for language in group
    ]
    made_from = [*digests, local.vocab_size, local.vocab_lines, local.mono_alpha]
    suffix = ".model"
    if local.hot_start:
        made_from.append(tokenizers.load(config.hot_start_folder(local)).digest)
        suffix = ""
    name = f"vocabulary-{files.digest_of(made_from)}{suffix}"
    path = local.prepared_dir / name
    if not path.exists():
        mixes = language_mixture.parse_tasks(agreed.task_mix, groups)
        language_mixture.check_lines(text, groups, mixes)
        with process.timed(f"making a vocabulary of {local.vocab_size} pieces"):
            make_vocabulary(run, path)
    return path


def make_vocabulary(run: config.Run, path: pathlib.Path) -> int:
    """Makes the vocabulary that the run's clusters share; returns its size.

    Args:
      run: with --generators written out.
      path: of a sentencepiece model; with --hot_start, of a folder, which must not be
        there.
    """
    local = run.local
    languages = [language for group in run.agreed.groups() for language in group]
    lines = language_mixture.vocabulary_lines(
        folder(local), languages, local.mono_alpha, local.vocab_lines
    )
    if not local.hot_start:
        return vocabularies.train(lines, local.vocab_size, path)
    whole = tokenizers.load(config.hot_start_folder(local))
    counts = tokenizers.count_pieces(whole, lines)
    most = np.argsort(-counts, kind="stable")
    most = most[: local.vocab_size - vocabularies.NUM_SPECIAL]
    keep = tokenizers.kept_ids(whole, most[counts[most] > 0])
    share = counts[keep].sum() / max(1, counts.sum())
    process.message(f"{len(keep):,} of {whole.size:,} pieces, {share:.2%} of the text")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as temporary:
        made = pathlib.Path(temporary) / path.name
        tokenizers.save(made, tokenizers.trim(whole, keep))
        try:
            made.rename(path)
        except OSError:
            if not path.is_dir():  # else another run has just made the same
                raise
    return len(keep)


def vocabulary(local: config.Local) -> vocabularies.Vocabulary:
    """Returns --vocabulary, which a cluster that runs alone must be given."""
    if not local.vocabulary:
        raise errors.SettingsError(
            f"--cluster={local.cluster} needs --vocabulary, the file that all clusters"
            " share (python -m scripts.train_vocabulary makes one)"
        )
    return vocabularies.load(pathlib.Path(local.vocabulary))


class GeneratorText:
    """The text of one generator: an endless stream to train on, and held-out lines.

    With --data it is read from who serves it, until the text is closed.
    """

    def __init__(
        self,
        run: config.Run,
        index: int,
        vocabulary: vocabularies.Vocabulary,
        work: activity.Work | None = None,
    ) -> None:
        """Prepares the text of generator `index`.

        Args:
          run: of this process.
          index: of the generator.
          vocabulary: of the run.
          work: of this process, for --data.

        Raises:
          errors.NebulaError: if it cannot be had.
        """
        agreed, local, groups = run.agreed, run.local, run.agreed.groups()
        self._agreed, self._group = agreed, groups[index]
        self._remote: remote_text.RemoteText | None = None
        mix = language_mixture.parse_tasks(agreed.task_mix, groups)[index]
        exponents = language_mixture.SamplingExponents(
            local.mono_alpha, local.parallel_alpha
        )
        if local.data:
            reading = remote_text.Reading(
                *(f"generator:{index}", vocabulary.digest, vocabulary.size),
                *(agreed.max_length, agreed.batch_size),
            )
            wanted = data_channels.parse(local.data)
            remote = remote_text.RemoteText(local.connection(), wanted, reading, work)
            self._remote = remote

            def opened(
                kind: str, language: str, splits: Sequence[str]
            ) -> packed_sequences.Prepared:
                part = remote.part(f"{kind}/{language}", splits)
                return packed_sequences.Prepared(*part)

            data = language_mixture.mixture(self._group, mix, exponents, opened)
            rows = agreed.eval_batches * agreed.batch_size  # which every evaluation has
            held_out = {name: text[:rows] for name, text in data.held_out.items()}
            data = data._replace(held_out=held_out)
        else:
            data = language_mixture.open_generator(
                folder(local),
                self._group,
                mix,
                exponents,
                vocabulary=vocabulary,
                max_length=agreed.max_length,
                prepared_dir=local.prepared_dir,
            )
        self._held_out = data.held_out
        self._key = files.digest_of(
            [(source.name, source.key, source.weight) for source in data.sources]
        )
        self._sources = data.sources
        # Far enough apart that no two generators shuffle any two sources alike.
        self._seed = agreed.seed + 1000 * (index + 1)
        self.batches: Any = None
        """Endless [rows, L] int32, once they are begun."""

    def __enter__(self) -> "GeneratorText":
        return self

    def __exit__(self, *exception: object) -> None:
        """Ends the session with who serves the text."""
        if self._remote is not None:
            self._remote.close()

    @property
    def end(self) -> errors.NebulaError | None:
        """The reason why the text ends before the run; None while it does not."""
        return None if self._remote is None else self.batches.end

    def position(self) -> Any:
        """Returns where the stream is, and in which text, as JSON values."""
        return {"text": self._key, "stream": self.batches.get_state()}

    def begin(self, position: Any, batch_size: int, rows: slice = slice(None)) -> None:
        """Begins the stream of batches at a saved position.

        Text that is served elsewhere may end at any batch. So those that this cluster
        may have to train on after it has requested the end are read before.

        Args:
          position: of the stream; None is its beginning.
          batch_size: rows of a step.
          rows: of every batch, those that this process trains on.

        Raises:
          errors.NebulaError: if the text or its mixture is not what it was, or text
            that is served elsewhere ends already.
        """
        remote, more = self._remote, {}
        if remote is not None:  # a grant pays for each row: none that is not needed
            more = {"fetch": remote.fetch, "most": self._agreed.steps}
        self.batches = resumable_batches.training_batches(
            *(self._sources, batch_size, self._agreed.max_length, self._seed, rows),
            **more,
        )
        if remote is not None:
            # pace.last_step_after_stop: `window` steps after the next one.
            ahead = self._agreed.window + 2
            self.batches = read_ahead.ReadAhead(self.batches, ahead)
        if position is not None:
            if position["text"] != self._key:
                raise errors.NebulaError(
                    f"the text of {' '.join(self._group)} or its --mono_alpha or"
                    " --parallel_alpha changed since the checkpoint; put it back, or"
                    " name another --workdir"
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
                self._agreed.batch_size,
                self._agreed.max_length,
            )
            for language in self._group
        }
        for language, part in held_out_order(self._agreed, self._group):
            yield language, parts[language][part]


def held_out_order(agreed: config.Agreed, group: list[str]) -> list[tuple[str, int]]:
    """Returns (language, batch) of a generator's held-out batches, as they are sent."""
    batches = range(agreed.eval_batches)
    return [(language, batch) for language in group for batch in batches]


def held_out_rng(micro_batch: int) -> jax.Array:
    """Returns a key: held-out text is masked alike at every evaluation of any run."""
    return jax.random.key(HELD_OUT_SEED + micro_batch)
