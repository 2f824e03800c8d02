"""The text of one reader: its stream, where it goes on, what is held out."""

import itertools

import configured
import numpy as np
import pytest
import tiny_runs

from experiments.m3 import config
from experiments.pretraining import text
from nebula_jax import errors
from nebula_jax.data import language_mixture, resumable_batches
from nebula_jax.data.tokenizers import vocabulary as vocabularies

LENGTH = 16
READER = text.Reader(
    cluster="generator:0",
    languages=["de", "sw"],
    mix={"mrtd": 0.5, "trtd": 0.5},
    seed=77,
    rows=4,
    held_out_rows=3,
    ahead=2,
    most=None,
)


def test_no_two_streams_of_a_run_shuffle_alike():
    agreed = configured.run(config).agreed
    seeds = [text.seed_of(agreed.seed, stream) for stream in range(8)]
    assert np.min(np.diff(seeds)) > 2 * 15  # two sources of each of 15 languages


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run and its vocabulary."""
    folder = tmp_path_factory.mktemp("text")
    tiny_runs.write_text(folder / "text")
    lines = language_mixture.vocabulary_lines(folder / "text", ["de", "sw"], 0.3, 1000)
    vocabularies.train(lines, 100, folder / "v.model")
    run = configured.run(
        config, data_dir=folder / "text", prepared_dir=folder / "p", max_length=LENGTH
    )
    return run, vocabularies.load(folder / "v.model")


def opened(made, reader=READER, **local):
    run, vocabulary = made
    run = run.with_local(**local)
    return text.Text(run.agreed, run.local, reader, vocabulary)


def test_the_stream_is_that_of_the_mixture_and_the_seed(made):
    found = opened(made)
    found.begin(None, 4, slice(1, 3))
    run, vocabulary = made
    exponents = language_mixture.SamplingExponents(0.3, 0.7)
    data = language_mixture.open_generator(
        text.folder(run.local), READER.languages, READER.mix, exponents,
        vocabulary=vocabulary, max_length=LENGTH, prepared_dir=run.local.prepared_dir,
    )  # fmt: skip
    wanted = resumable_batches.training_batches(
        resumable_batches.numbered(data.sources, 4, LENGTH, READER.seed)
    )
    for batch, whole in itertools.islice(zip(found.batches, wanted, strict=True), 5):
        np.testing.assert_array_equal(batch, whole[1:3])
    assert found.end is None


def test_it_goes_on_in_the_same_text_alone(made):
    first = opened(made)
    first.begin(None, 4)
    whole = list(itertools.islice(first.batches, 6))
    again = opened(made)
    again.begin(None, 4)
    for _ in range(2):
        next(again.batches)
    position = again.position()
    again = opened(made)
    again.begin(position, 4)
    np.testing.assert_array_equal(list(itertools.islice(again.batches, 4)), whole[2:])
    other = opened(made, mono_alpha=0.5)
    with pytest.raises(errors.NebulaError, match="text of de sw, the way it is"):
        other.begin(position, 4)


def test_held_out_text_comes_by_language_in_the_order_of_the_file(made):
    run = made[0]
    found = list(opened(made).held_out())
    order = text.held_out_order(run.agreed, READER.languages)
    assert order == [("de", 0), ("de", 1), ("sw", 0), ("sw", 1)]
    assert [language for language, _ in found] == [language for language, _ in order]
    assert {batch.shape for _, batch in found} == {(3, LENGTH)}
    again = opened(made, READER._replace(seed=5, held_out_rows=6)).held_out()
    np.testing.assert_array_equal(
        np.concatenate([found[0][1], found[1][1]]), next(again)[1]
    )


def test_languages_are_groups_or_all_of_the_folder(made):
    local = made[0].local
    assert text.groups(("en de|hi", "ur"), local) == [["en", "de"], ["hi", "ur"]]
    assert text.groups(("all",), local) == [["de", "en", "sw"]]
    with pytest.raises(errors.NebulaError, match=r"^languages="):
        text.groups(("en|",), local)
    local = configured.run(config, data="handle:x", federation="f").local
    with pytest.raises(errors.SettingsError, match="--languages=all: with --data"):
        text.groups(("all",), local)
