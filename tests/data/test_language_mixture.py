import re
import shutil

import numpy as np
import pytest

from nebula_jax.data import (
    language_mixture,
    packed_sequences,
    resumable_batches,
    text_folder,
    tsv,
)
from nebula_jax.data.tokenizers import vocabulary as vocabularies

GROUPS = [["en", "de"], ["hi", "ur"]]


def test_errors_name_the_flag_and_its_readers():
    names = ("languages", "cluster")
    for text, words in (
        ("en|", 'languages="en|": a cluster without languages'),
        ("", 'languages="": a cluster without languages'),
        ("en|../x", "languages: '../x' is no language"),
        ("en|en", "languages=\"en|en\": 'en' comes twice"),
    ):
        with pytest.raises(language_mixture.MixtureError, match=re.escape(words)):
            language_mixture.parse_groups(text, *names)
    with pytest.raises(language_mixture.MixtureError, match="cluster:0 has no"):
        language_mixture.parse_tasks("trtd", [["en"], ["de"]], "cluster")


def test_groups_are_read_and_one_task_mix_serves_all_or_each_has_its_own():
    assert language_mixture.parse_groups("en de|hi, ur") == GROUPS
    half = {"mrtd": 0.5, "trtd": 0.5}
    assert language_mixture.parse_tasks("mrtd trtd", GROUPS) == [half, half]
    assert language_mixture.parse_tasks("mrtd|mrtd=1 trtd=3", GROUPS) == [
        {"mrtd": 1.0, "trtd": 0.0},
        {"mrtd": 0.25, "trtd": 0.75},
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mlm", "unknown task 'mlm'"),
        ("mrtd=x", "'x' is no weight"),
        ("mrtd=nan", "'nan' is no weight"),
        ("mrtd=0", "without a task"),
        ("mrtd|mrtd|mrtd", "3 mixes for 2 generators"),
    ],
)
def test_bad_tasks_are_refused(text, words):
    with pytest.raises(language_mixture.MixtureError, match=words):
        language_mixture.parse_tasks(text, GROUPS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    (folder / "mono").mkdir()
    (folder / "parallel").mkdir()
    for language, count in (("en", 300), ("de", 30), ("fr", 60)):
        for split in ("train", "valid"):
            lines = [f"{language} line {n} of {split} text" for n in range(count)]
            path = folder / "mono" / f"{language}.{split}.txt"
            path.write_text("".join(line + "\n" for line in lines))
    for language, count in (("de", 100), ("fr", 20)):
        rows = [f"en\t{language}"]
        rows += [f"a pair {n}\t{language} line {n}" for n in range(count)]
        path = folder / "parallel" / f"en-{language}.train.tsv"
        path.write_text("".join(row + "\n" for row in rows))
    lines = language_mixture.vocabulary_lines(folder, ["en", "de"], 0.3, 1000)
    vocabularies.train(lines, 80, folder / "v.model")
    return folder


def open_generator(folder, mix, languages=("en", "de")):
    return language_mixture.open_generator(
        folder,
        languages,
        mix,
        language_mixture.SamplingExponents(mono=0.3, parallel=0.7),
        vocabulary=vocabularies.load(folder / "v.model"),
        max_length=32,
        prepared_dir=folder / "prepared",
    )


def test_each_kind_of_text_has_its_own_exponent(folder):
    """0.3 for single languages, 0.7 for translations, of which there are two here."""
    languages = ("en", "de", "fr")
    data = open_generator(folder, {"mrtd": 0.6, "trtd": 0.4}, languages)
    sizes = [len(source.sequences) for source in data.sources]
    mono = 0.6 * resumable_batches.language_weights(sizes[:3], 0.3)
    parallel = 0.4 * resumable_batches.language_weights(sizes[3:], 0.7)
    weights = [source.weight for source in data.sources]
    np.testing.assert_allclose(weights, [*mono, *parallel])
    assert [source.name for source in data.sources] == [
        *("mono/en", "mono/de", "mono/fr"),
        *("parallel/en-de", "parallel/en-fr"),
    ]
    assert sizes[3] > sizes[4]
    assert list(data.held_out) == ["en", "de", "fr"]


def test_a_task_that_is_not_asked_for_is_not_even_opened(folder):
    only_mono = open_generator(folder, {"mrtd": 1.0, "trtd": 0.0})
    assert [source.name for source in only_mono.sources] == ["mono/en", "mono/de"]
    only_pairs = open_generator(folder, {"mrtd": 0.0, "trtd": 1.0})
    assert [source.name for source in only_pairs.sources] == ["parallel/en-de"]


def test_text_is_checked_before_anything_starts(folder):
    language_mixture.check_text(folder, [["en", "de"]], [{"mrtd": 1.0, "trtd": 1.0}])
    with pytest.raises(text_folder.CorpusError, match="'sw' has no text"):
        language_mixture.check_text(
            folder, [["en", "sw"]], [{"mrtd": 1.0, "trtd": 0.0}]
        )


def test_a_malformed_line_is_found_before_anything_starts(folder, tmp_path):
    groups, mixes = [["en", "de"]], [{"mrtd": 1.0, "trtd": 1.0}]
    language_mixture.check_lines(folder, groups, mixes)
    shutil.copytree(folder, tmp_path / "copy")
    with (tmp_path / "copy/parallel/en-de.train.tsv").open("a") as stream:
        stream.write("no tab\n")
    with pytest.raises(text_folder.CorpusError, match="tsv:102: 1 tab-separated"):
        language_mixture.check_lines(tmp_path / "copy", groups, mixes)
    (tmp_path / "copy/parallel/en-de.train.tsv").unlink()
    for check in (language_mixture.check_text, language_mixture.check_lines):
        check(tmp_path / "copy", groups, [{"mrtd": 1.0, "trtd": 0.0}])


def test_vocabulary_lines_balance_languages_and_are_always_the_same(folder):
    lines = list(language_mixture.vocabulary_lines(folder, ["en", "de"], 0.3, 60))
    assert lines == list(
        language_mixture.vocabulary_lines(folder, ["en", "de"], 0.3, 60)
    )
    shares = np.round(60 * resumable_batches.language_weights([300, 30], 0.3))
    assert sum(line.startswith("en") for line in lines) == shares[0]
    assert sum(line.startswith("de") for line in lines) == shares[1]


@pytest.mark.parametrize("languages", [["en", "xx"], ["xx"]])
def test_a_language_without_a_sequence_is_named(languages):
    """As of lines whose characters the tokenizer drops."""

    def opened(kind, language, splits):
        rows = [] if language == "xx" else [np.zeros(8, np.int32)] * 4
        return packed_sequences.Prepared(language, dict.fromkeys(splits, rows))

    mix, exponents = {"mrtd": 1.0, "trtd": 0.0}, language_mixture.SamplingExponents()
    with pytest.raises(tsv.CorpusError, match="mono/xx has no text to train on"):
        language_mixture.mixture(languages, mix, exponents, opened)


def test_a_language_that_the_vocabulary_lacks_is_no_language_of_a_run():
    unk, said = vocabularies.SPECIAL.unk, []

    def check(unknown):
        ids = [2, *[unk] * unknown, *range(5, 105 - unknown), 3]
        held_out = {"zh": [{"input_ids": np.asarray(ids, np.int32)}]}
        language_mixture.check_known(held_out, said.append)

    check(2)
    assert not said
    check(10)
    assert "WARNING: zh: 10% of the pieces" in said[0]
    assert "A few percent are rare characters and do no harm" in said[0]
    with pytest.raises(language_mixture.MixtureError, match="zh: 60% of the pieces"):
        check(60)
