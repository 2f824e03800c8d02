"""The text of an M3 run: whose it is, the vocabulary, what is held back."""

import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from experiments import lifecycle, shared_flags
from experiments.m3 import config as m3_config
from nebula_jax import errors
from nebula_jax.data import (
    django_messages,
    language_mixture,
    resumable_batches,
    tokenizers,
)
from nebula_jax.data import text_folder as corpora
from nebula_jax.data.tokenizers import vocabulary as vocabularies

HELD_BACK_SEED = 1_000_003


def groups(data_dir: pathlib.Path | None) -> list[list[str]]:
    """Languages of each generator, from --generators.

    Args:
      data_dir: where a bare number is looked up; None on the discriminator, which has
        no text and must be told the languages.
    """
    text = m3_config.GENERATORS.value.strip()
    if not text.isdigit():
        return language_mixture.parse_groups(text)
    if data_dir is None:
        raise shared_flags.FlagError(
            f"--generators={text}: the discriminator has no text folder to look this"
            ' up in; write the groups out, as in --generators="en de|hi ur"'
        )
    return corpora.families(data_dir, int(text))


def text_folder() -> pathlib.Path:
    """--data_dir, after writing Django's messages out if those are asked for."""
    if not shared_flags.DATA_DIR.value.startswith("package:"):
        return pathlib.Path(shared_flags.DATA_DIR.value)
    if shared_flags.DATA_DIR.value != "package:django":
        raise shared_flags.FlagError(
            f"--data_dir={shared_flags.DATA_DIR.value}: the one package known is"
            " package:django"
        )
    folder = pathlib.Path(shared_flags.PREPARED_DIR.value) / "django_messages"
    if not (folder / "mono" / "families.json").is_file():  # written last
        with lifecycle.timed("writing Django's messages as a text folder"):
            django_messages.write_text_folder(folder)
    return folder


def check(only: int | None = None) -> list[list[str]]:
    """--generators and --tasks, checked against each other and the text folder.

    Args:
      only: the one generator whose text has to be here; None for all of them.

    Returns:
      The languages of each generator.

    Raises:
      errors.NebulaError: at what cannot be.
    """
    data_dir = text_folder()
    corpora.check_folder(data_dir)
    owners = groups(data_dir)
    mixes = language_mixture.parse_tasks(m3_config.TASKS.value, owners)
    mine = slice(None) if only is None else slice(only, only + 1)
    if not owners[mine]:
        raise shared_flags.FlagError(
            f"--cluster=generator:{only}: --generators has {len(owners)}, from 0"
        )
    language_mixture.check_text(data_dir, owners[mine], mixes[mine])
    return owners


def shared_vocabulary(owners: list[list[str]]) -> pathlib.Path:
    """--vocabulary, or one made of all of the run's text (once per text).

    Before it is made, every line of the text is checked.
    """
    if m3_config.VOCABULARY.value:
        return pathlib.Path(m3_config.VOCABULARY.value)
    data_dir = text_folder()
    texts = [
        corpora.digest(corpora.mono_path(data_dir, language, "train"))
        for group in owners
        for language in group
    ]
    size, limit = m3_config.VOCAB_SIZE.value, m3_config.VOCAB_LINES.value
    made_from = [*texts, size, limit, m3_config.MONO_ALPHA.value]
    suffix = ".model"
    if m3_config.HOT_START.value:
        made_from.append(tokenizers.load(m3_config.hot_start_folder()).digest)
        suffix = ""
    name = f"vocabulary-{corpora.digest_of(made_from)}{suffix}"
    path = pathlib.Path(shared_flags.PREPARED_DIR.value) / name
    if not path.exists():
        mixes = language_mixture.parse_tasks(m3_config.TASKS.value, owners)
        language_mixture.check_lines(data_dir, owners, mixes)
        with lifecycle.timed(f"making a vocabulary of {size} pieces"):
            make_vocabulary(owners, path)
    return path


def make_vocabulary(owners: list[list[str]], path: pathlib.Path) -> int:
    """Makes the vocabulary that the run's clusters share; its size.

    Args:
      owners: the languages of each generator.
      path: of a sentencepiece model; with --hot_start, of a folder, which must not be
        there.
    """
    languages = [language for group in owners for language in group]
    lines = language_mixture.vocabulary_lines(
        text_folder(),
        languages,
        m3_config.MONO_ALPHA.value,
        m3_config.VOCAB_LINES.value,
    )
    size = m3_config.VOCAB_SIZE.value
    if not m3_config.HOT_START.value:
        return vocabularies.train(lines, size, path)
    whole = tokenizers.load(m3_config.hot_start_folder())
    counts = tokenizers.count_pieces(whole, lines)
    most = np.argsort(-counts, kind="stable")[: size - vocabularies.NUM_SPECIAL]
    keep = tokenizers.kept_ids(whole, most[counts[most] > 0])
    share = counts[keep].sum() / max(1, counts.sum())
    lifecycle.say(f"{len(keep):,} of {whole.size:,} pieces, {share:.2%} of the text")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = pathlib.Path(folder) / path.name
        tokenizers.save(made, tokenizers.trim(whole, keep))
        try:
            made.rename(path)
        except OSError:
            if not path.is_dir():  # else another run has just made the same
                raise
    return len(keep)


def given_vocabulary() -> vocabularies.Vocabulary:
    """--vocabulary, which a cluster that runs alone must be given."""
    if not m3_config.VOCABULARY.value:
        raise shared_flags.FlagError(
            f"--cluster={shared_flags.CLUSTER.value} needs --vocabulary, the file that"
            " all clusters share (python -m scripts.train_vocabulary makes one)"
        )
    return vocabularies.load(pathlib.Path(m3_config.VOCABULARY.value))


class GeneratorText:
    """What one generator reads: an endless stream to train on, and held-back lines."""

    def __init__(self, owners: list[list[str]], index: int, data, seed: int):
        self.owners = owners
        self._group = owners[index]
        self._held_back = data.held_back
        self._key = corpora.digest_of(
            [(source.name, source.key, source.weight) for source in data.sources]
        )
        self.batches = resumable_batches.training_batches(
            data.sources,
            shared_flags.BATCH_SIZE.value,
            m3_config.MAX_LENGTH.value,
            seed,
        )

    def position(self) -> Any:
        """Where the stream is, and in which text, as JSON values."""
        return {"text": self._key, "stream": self.batches.get_state()}

    def go_to(self, position: Any) -> None:
        """Moves the stream to a saved position; None is the beginning.

        Raises:
          errors.NebulaError: if the text or its mixture is not what it was.
        """
        if position is None:
            return
        if position["text"] != self._key:
            raise errors.NebulaError(
                f"the text of {' '.join(self._group)} or its --mono_alpha or"
                " --parallel_alpha changed since the checkpoint; put it back, or name"
                " another --workdir"
            )
        self.batches.set_state(position["stream"])

    def held_back(self) -> Iterator[tuple[str, np.ndarray]]:
        """(language, [B, L] int32) in the order of `held_back_order`."""
        parts = {
            language: resumable_batches.held_back_batches(
                self._held_back[language],
                m3_config.EVAL_BATCHES.value,
                shared_flags.BATCH_SIZE.value,
                m3_config.MAX_LENGTH.value,
            )
            for language in self._group
        }
        for language, part in held_back_order(self._group):
            yield language, parts[language][part]


def open_generator(index: int, vocabulary: vocabularies.Vocabulary) -> GeneratorText:
    """The text of generator `index`, prepared."""
    data_dir = text_folder()
    owners = groups(data_dir)
    data = language_mixture.open_generator(
        data_dir,
        owners[index],
        language_mixture.parse_tasks(m3_config.TASKS.value, owners)[index],
        language_mixture.Alphas(
            m3_config.MONO_ALPHA.value, m3_config.PARALLEL_ALPHA.value
        ),
        vocabulary=vocabulary,
        max_length=m3_config.MAX_LENGTH.value,
        prepared_dir=pathlib.Path(shared_flags.PREPARED_DIR.value),
    )
    # Far enough apart that no two generators shuffle any two sources alike.
    seed = shared_flags.SEED.value + 1000 * (index + 1)
    return GeneratorText(owners, index, data, seed)


def held_back_order(group: list[str]) -> list[tuple[str, int]]:
    """(language, batch) of each held-back batch of a generator, in sending order."""
    count = m3_config.EVAL_BATCHES.value
    return [(language, batch) for language in group for batch in range(count)]


def held_back_rng(micro_batch: int) -> jax.Array:
    """Held-back text is masked alike at every evaluation of every run."""
    return jax.random.key(HELD_BACK_SEED + micro_batch)
