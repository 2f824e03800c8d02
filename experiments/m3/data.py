"""The text of an M3 run: whose it is, the vocabulary, what is held out.

B batch, L length.
"""

import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from experiments import command_line
from experiments.m3 import config
from nebula_jax import errors, files
from nebula_jax.data import (
    django_messages,
    language_mixture,
    resumable_batches,
    text_folder,
    tokenizers,
)
from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.runtime import process

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
    """Returns the run of a discriminator, which has no text to look groups up in.

    Raises:
      errors.NebulaError: if the languages of each generator are not written out.
    """
    generators = run.agreed.generators.strip()
    if command_line.whole_number(generators) is not None:
        raise errors.SettingsError(
            f"--generators={generators}: the discriminator has no text folder to look"
            ' this up in; write the groups out, as in --generators="en de|hi ur"'
        )
    groups = run.agreed.groups()
    language_mixture.parse_tasks(run.agreed.task_mix, groups)
    return config.with_groups(run, groups)


def checked(run: config.Run, only: int | None = None) -> config.Run:
    """Returns the run with --generators written out, checked against its text.

    Args:
      run: of this process.
      only: the one generator whose text has to be here; None for all of them.

    Raises:
      errors.NebulaError: at what cannot be.
    """
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
    if not groups[here]:
        raise errors.SettingsError(
            f"--cluster=generator:{only}: --generators has {len(groups)}, from 0"
        )
    language_mixture.check_text(text, groups[here], mixes[here])
    return config.with_groups(run, groups)


def shared_vocabulary(run: config.Run) -> pathlib.Path:
    """Returns --vocabulary, or one made of all of the run's text (once per text).

    Before it is made, every line of the text is checked.
    """
    agreed, local, groups = run.agreed, run.local, run.agreed.groups()
    if local.vocabulary:
        return pathlib.Path(local.vocabulary)
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
    """The text of one generator: an endless stream to train on, and held-out lines."""

    def __init__(
        self, run: config.Run, index: int, vocabulary: vocabularies.Vocabulary
    ) -> None:
        """Prepares the text of generator `index`.

        Args:
          run: of this process.
          index: of the generator.
          vocabulary: of the run.
        """
        agreed, local, groups = run.agreed, run.local, run.agreed.groups()
        self._agreed, self._group = agreed, groups[index]
        data = language_mixture.open_generator(
            folder(local),
            self._group,
            language_mixture.parse_tasks(agreed.task_mix, groups)[index],
            language_mixture.SamplingExponents(local.mono_alpha, local.parallel_alpha),
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

    def position(self) -> Any:
        """Returns where the stream is, and in which text, as JSON values."""
        return {"text": self._key, "stream": self.batches.get_state()}

    def begin(self, position: Any, batch_size: int, rows: slice = slice(None)) -> None:
        """Begins the stream of batches at a saved position.

        Args:
          position: of the stream; None is its beginning.
          batch_size: rows of a step.
          rows: of every batch, those that this process trains on.

        Raises:
          errors.NebulaError: if the text or its mixture is not what it was.
        """
        self.batches = resumable_batches.training_batches(
            *(self._sources, batch_size, self._agreed.max_length, self._seed, rows)
        )
        if position is None:
            return
        if position["text"] != self._key:
            raise errors.NebulaError(
                f"the text of {' '.join(self._group)} or its --mono_alpha or"
                " --parallel_alpha changed since the checkpoint; put it back, or name"
                " another --workdir"
            )
        self.batches.set_state(position["stream"])

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
