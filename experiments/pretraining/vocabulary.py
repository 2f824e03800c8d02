"""The vocabulary that all clusters of a pre-training run share: given, or made of text.

Without --hot_start it is a sentencepiece model, trained on the text. With it, it is the
tokenizer of that encoder, trimmed to the pieces that the text has most.
"""

import pathlib
import tempfile
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from experiments import configuration
from experiments.pretraining import config, hot_start, text
from nebula_jax import errors, files
from nebula_jax.data import language_mixture, text_folder, tokenizers
from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.runtime.life import process


def given(local: config.Local) -> vocabularies.Vocabulary:
    """Returns --vocabulary, which a cluster that runs alone must be given."""
    if not local.vocabulary:
        raise errors.SettingsError(
            f"--cluster={local.cluster} needs --vocabulary, the file that all clusters"
            " share (python -m scripts.train_vocabulary makes one)"
        )
    return vocabularies.load(pathlib.Path(local.vocabulary))


def compared(
    agreed: config.Agreed, local: config.Local, vocabulary: vocabularies.Vocabulary
) -> dict[str, Any]:
    """Returns what a Hello compares, and a checkpoint is checked against."""
    values = configuration.settings(agreed)
    values["vocabulary"] = vocabulary.digest[:16]
    if local.hot_start:
        # Clusters may have it in different places.
        values["--hot_start"] = hot_start.digest(local)[:16]
    return values


def shared(
    local: config.Local,
    groups: Sequence[Sequence[str]],
    mixes: Sequence[language_mixture.TaskWeights],
    pairs: Sequence[str] = (),
) -> pathlib.Path:
    """Returns --vocabulary, or one made of all of the run's text (once per text).

    Before it is made, every line of the text is checked. Each reader has a group, its
    languages, and a mix, its task weights.
    """
    if local.vocabulary:
        return pathlib.Path(local.vocabulary)
    if local.data:
        raise errors.SettingsError(
            f"--data={local.data} needs --vocabulary, the file that its owner has"
            " registered it with"
        )
    folder = text.folder(local)
    languages = [language for group in groups for language in group]
    digests = [
        files.digest(text_folder.mono_path(folder, language, "train"))
        for language in languages
    ]
    made_from = [
        "long lines cut",
        *digests,
        local.vocab_size,
        local.vocab_lines,
        local.mono_alpha,
    ]
    suffix = ".model"
    if local.hot_start:
        made_from.append(tokenizers.load(hot_start.folder(local)).digest)
        suffix = ""
    name = f"vocabulary-{files.digest_of(made_from)}{suffix}"
    path = local.prepared_dir / name
    if not path.exists():
        language_mixture.check_lines(folder, groups, mixes, pairs)
        with process.timed(f"making a vocabulary of {local.vocab_size} pieces"):
            make(local, languages, path)
    return path


def _describe(
    folder: pathlib.Path,
    languages: Sequence[str],
    vocabulary: vocabularies.Vocabulary,
) -> None:
    """Says how much of each language's text the vocabulary and a run have."""
    for language in languages:
        lines = cut = dropped = 0
        pieces = np.zeros(vocabulary.size, np.int64)
        for line in text_folder.read_mono(
            text_folder.mono_path(folder, language, "train")
        ):
            ids = vocabulary.encode(line)
            lines += 1
            cut += len(vocabularies.cut(line)) > 1
            dropped += not ids
            pieces += np.bincount(ids, minlength=vocabulary.size)
        unknown = pieces[vocabularies.SPECIAL.unk] / max(1, pieces.sum())
        process.message(
            f"{language}: {lines:,} lines; {cut:,} were cut for the vocabulary,"
            f" {dropped:,} have no text and are left out; {unknown:.2%} of the pieces"
            " are unknown"
        )


def make(local: config.Local, languages: Sequence[str], path: pathlib.Path) -> int:
    """Makes the vocabulary that a run's clusters share; returns its size.

    Reports how many lines of each language were cut or left out, and what is unknown.
    The path is of a sentencepiece model; with --hot_start, of a folder, not yet there.
    """
    lines = language_mixture.vocabulary_lines(
        text.folder(local), languages, local.mono_alpha, local.vocab_lines
    )
    if local.hot_start:
        _trim(local, lines, path)
    else:
        vocabularies.train(lines, local.vocab_size, path)
    made = vocabularies.load(path)
    _describe(text.folder(local), languages, made)
    return made.size


def _trim(local: config.Local, lines: Iterable[str], path: pathlib.Path) -> None:
    """Writes the tokenizer of --hot_start with the pieces that lines have most."""
    whole = tokenizers.load(hot_start.folder(local))
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
