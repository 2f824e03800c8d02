"""The corpora that a generator reads, and their shares (sections 3.1, 4.1).

A generator has a group of languages and weights of tasks: `mrtd` reads their
monolingual text, `trtd` their translations: pairs of English and each of them, or of
named pairs those whose second language it has. Within a task, a language or a pair has
a share ∝ n^α of the sequences, n those that there are. Languages are interleaved in
these shares, in an order that is the same for every seed: of few languages and a batch
of few rows, a cluster that always has the same rows of it has some more than others.
"""

import functools
import heapq
import pathlib
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from nebula_jax import errors
from nebula_jax.data import packed_sequences, resumable_batches, text_folder, tsv
from nebula_jax.data.tokenizers import vocabulary as vocabularies

TASKS = ("mrtd", "trtd")
TaskWeights = Mapping[str, float]  # task -> share of a generator's batches; sum 1

SAMPLE = 200  # sequences of a language in which unknown pieces are counted
UNUSUAL, MOST_UNKNOWN = 0.03, 0.5  # shares of unknown pieces: a warning, an error

_LANGUAGE = re.compile(r"[A-Za-z0-9_-]{1,35}")  # part of a file's name


class MixtureError(errors.SettingsError):
    """A malformed grouping of languages, or malformed task weights."""


class SamplingExponents(NamedTuple):
    """The sampling exponents of the two kinds of text."""

    mono: float = 0.3  # XLM-R's; the paper states none
    parallel: float = 0.7  # XLM-E's; the paper states none


class GeneratorData(NamedTuple):
    """The text of one generator: to train on, and of each language held-out lines."""

    sources: list[resumable_batches.Source]  # with weights that sum to 1
    held_out: dict[str, Sequence[dict[str, np.ndarray]]]  # by language, packed


Open = Callable[[str, str, Sequence[str]], packed_sequences.Prepared]
"""Given `mono` and a language, or `parallel` and a pair such as `en-sw`, and splits,
opens their sequences."""


def parse_groups(
    text: str, flag: str = "generators", reader: str = "generator"
) -> list[list[str]]:
    """Parses `en de|hi ur` to [[en, de], [hi, ur]], the languages of each reader.

    MixtureError names `flag`, that has the text, and `reader`, a kind of cluster: at an
    empty group, what is no language, or one in two groups.
    """
    groups = [group.replace(",", " ").split() for group in text.split("|")]
    if not all(groups):
        raise MixtureError(f'{flag}="{text}": a {reader} without languages')
    names = [language for group in groups for language in group]
    for language in names:
        if not _LANGUAGE.fullmatch(language):
            raise MixtureError(
                f"{flag}: {language[:40]!r} is no language, such as sw or zh"
            )
        if names.count(language) > 1:
            raise MixtureError(f'{flag}="{text}": {language!r} comes twice')
    return groups


def format_groups(groups: Sequence[Sequence[str]]) -> str:
    """Formats groups as a flag value that `parse_groups` reads."""
    return "|".join(" ".join(group) for group in groups)


def pairs_of(language: str, named: Sequence[str] = ()) -> list[str]:
    """Lists the pairs that the reader of a language reads, of those named if any are.

    >>> pairs_of("fr"), pairs_of("en"), pairs_of("fr", named=["en-de", "de-fr"])
    (['en-fr'], [], ['de-fr'])
    """
    if named:
        return [pair for pair in named if pair.partition("-")[2] == language]
    return [] if language == "en" else [f"en-{language}"]


def check_pairs(named: Sequence[str], groups: Sequence[Sequence[str]]) -> None:
    """Raises MixtureError at what is no pair, or one that no group reads."""
    known = {language for group in groups for language in group}
    for pair in named:
        first, _, second = pair.partition("-")
        if not _LANGUAGE.fullmatch(first) or second not in known - {first}:
            raise MixtureError(
                f"parallel_pairs={','.join(named)}: {pair[:80]!r} is no pair such as"
                " de-fr whose second language is one of the run's"
            )


def parse_tasks(
    text: str,
    groups: Sequence[Sequence[str]],
    reader: str = "generator",
    pairs: Sequence[str] = (),
) -> list[TaskWeights]:
    """Parses `mrtd|mrtd=1 trtd=3` to task weights of each reader; one serves all.

    MixtureError at an unknown task, a bad weight, another number of mixes than groups,
    what is no pair, or translation without a pair.
    """
    check_pairs(pairs, groups)
    mixes = [_mix(part, text, reader) for part in text.split("|")]
    if len(mixes) == 1:
        mixes *= len(groups)
    if len(mixes) != len(groups):
        raise MixtureError(
            f'task_mix="{text}" has {len(mixes)} mixes for {len(groups)} {reader}s'
        )
    for index, (mix, group) in enumerate(zip(mixes, groups, strict=True)):
        if mix["trtd"] > 0 and not any(pairs_of(each, pairs) for each in group):
            of = "that a pair of parallel_pairs ends with" if pairs else ""
            raise MixtureError(
                f'task_mix="{text}": {reader}:{index} has no language'
                f" {of or 'to pair with English'}, so it cannot do trtd; for text"
                ' without pairs give task_mix="mrtd=1"'
            )
    return mixes


def _mix(part: str, text: str, reader: str) -> TaskWeights:
    mix = dict.fromkeys(TASKS, 0.0)
    for item in part.replace(",", " ").split():
        task, _, weight = item.partition("=")
        if task not in TASKS:
            raise MixtureError(f'task_mix="{text}": unknown task {task!r}')
        try:
            mix[task] = float(weight) if weight else 1.0
        except ValueError:
            mix[task] = -1.0
        if not 0 <= mix[task] < float("inf"):
            raise MixtureError(f'task_mix="{text}": {weight!r} is no weight')
    total = sum(mix.values())
    if not total:
        raise MixtureError(f'task_mix="{text}": a {reader} without a task')
    return {task: weight / total for task, weight in mix.items()}


def open_generator(
    data_dir: pathlib.Path,
    languages: Sequence[str],
    mix: TaskWeights,
    exponents: SamplingExponents,
    *,
    vocabulary: vocabularies.Vocabulary,
    max_length: int,
    prepared_dir: pathlib.Path,
    pairs: Sequence[str] = (),
) -> GeneratorData:
    """Prepares (once) into `prepared_dir`, and opens, all text of one generator.

    Of its two kinds of text `exponents` are α. CorpusError if it is malformed.
    """
    from nebula_jax.data import packed_text  # here, since many processes read no text

    opened = functools.partial(
        packed_text.prepare,
        data_dir,
        vocabulary=vocabulary,
        max_length=max_length,
        prepared_dir=prepared_dir,
    )
    return mixture(languages, mix, exponents, opened, pairs)


def mixture(
    languages: Sequence[str],
    mix: TaskWeights,
    exponents: SamplingExponents,
    opened: Open,
    pairs: Sequence[str] = (),
) -> GeneratorData:
    """Mixes the text of one generator, wherever it is."""
    held_out = {}
    mono, parallel = [], []
    for language in languages:
        prepared = opened("mono", language, ("train", "valid"))
        held_out[language] = prepared.splits["valid"]
        mono.append((f"mono/{language}", prepared))
        for pair in pairs_of(language, pairs) if mix["trtd"] > 0 else ():
            prepared = opened("parallel", pair, ("train",))
            parallel.append((f"parallel/{pair}", prepared))
    sources = _weighted(mono, mix["mrtd"], exponents.mono)
    sources += _weighted(parallel, mix["trtd"], exponents.parallel)
    return GeneratorData(sources, held_out)


def check_known(
    held_out: Mapping[str, Sequence[Mapping[str, np.ndarray]]],
    log: Callable[[str], None],
) -> None:
    """Warns of languages whose held-out text the vocabulary does not have.

    MixtureError if the vocabulary lacks half of a language's pieces, or more.
    """
    unk = vocabularies.SPECIAL.unk
    for language, part in held_out.items():
        some = [part[place]["input_ids"] for place in range(min(SAMPLE, len(part)))]
        ids = np.concatenate([np.zeros(0, np.int32), *some])
        ids = ids[(ids == unk) | (ids >= vocabularies.NUM_SPECIAL)]
        share = np.mean(ids == unk) if len(ids) else 0.0
        about = (
            f"{language}: {share:.0%} of the pieces of its held-out text are unknown to"
            " the vocabulary"
        )
        remedy = "make one of this text, with a larger --vocab_size"
        if share >= MOST_UNKNOWN:  # a line of one unknown word has `▁ [UNK]`
            raise MixtureError(f"{about}; {remedy}")
        if share > UNUSUAL:
            # A vocabulary leaves out the rarest characters, of which Chinese has many.
            log(
                f"WARNING: {about}, and nothing is learned of these. A few percent are"
                f" rare characters and do no harm; if there are more, {remedy}"
            )


def _weighted(
    named: Sequence[tuple[str, packed_sequences.Prepared]], share: float, alpha: float
) -> list[resumable_batches.Source]:
    if not named or not share:
        return []
    sizes = [len(prepared.splits["train"]) for _, prepared in named]
    if 0 in sizes:
        raise tsv.CorpusError(f"{named[sizes.index(0)][0]} has no text to train on")
    weights = resumable_batches.language_weights(sizes, alpha)
    return [
        resumable_batches.Source(
            name, prepared.splits["train"], share * float(weight), prepared.key
        )
        for (name, prepared), weight in zip(named, weights, strict=True)
    ]


def check_text(
    data_dir: pathlib.Path,
    groups: Sequence[Sequence[str]],
    mixes: Sequence[TaskWeights],
    pairs: Sequence[str] = (),
) -> None:
    """Raises CorpusError if a file that these groups need is missing."""
    text_folder.check_folder(data_dir)
    for _ in _texts(data_dir, groups, mixes, pairs):
        pass


def check_lines(
    data_dir: pathlib.Path,
    groups: Sequence[Sequence[str]],
    mixes: Sequence[TaskWeights],
    pairs: Sequence[str] = (),
) -> None:
    """Raises CorpusError at the first malformed line of these groups' text."""
    for lines in _texts(data_dir, groups, mixes, pairs):
        for _ in lines:
            pass


def _texts(
    data_dir: pathlib.Path,
    groups: Sequence[Sequence[str]],
    mixes: Sequence[TaskWeights],
    pairs: Sequence[str],
) -> Iterator[Iterator[Any]]:
    """Yields the lines or pairs of each file that these groups need."""
    for group, mix in zip(groups, mixes, strict=True):
        for language in group:
            for split in ("train", "valid"):
                path = text_folder.mono_path(data_dir, language, split)
                yield text_folder.read_mono(path)
            for pair in pairs_of(language, pairs) if mix["trtd"] > 0 else ():
                path = text_folder.parallel_path(data_dir, pair, "train")
                yield text_folder.read_parallel(path)


def vocabulary_lines(
    data_dir: pathlib.Path, languages: Sequence[str], alpha: float, limit: int
) -> Iterator[str]:
    """Yields sentences to train a vocabulary on, languages balanced by n^α.

    Monolingual training sentences, at most `limit`, the same ones every time; a
    language never gives more lines than it has.
    """
    counts = {}
    for language in languages:
        path = text_folder.mono_path(data_dir, language, "train")
        counts[language] = sum(1 for _ in text_folder.read_mono(path))
    weights = resumable_batches.language_weights(list(counts.values()), alpha)
    for language, weight in zip(languages, weights, strict=True):
        lines = text_folder.read_mono(
            text_folder.mono_path(data_dir, language, "train")
        )
        wanted = min(counts[language], round(limit * float(weight)))
        order = random.Random(language)
        # The `wanted` smallest of as many random numbers: a uniform sample, one pass.
        chosen = heapq.nsmallest(wanted, ((order.random(), line) for line in lines))
        for _, line in chosen:
            yield line
