"""The vocabulary of a run: given, or made once of all of its text."""

import configured
import numpy as np
import pytest
import tiny_hot_start
import tiny_runs

from experiments.bert import config
from experiments.pretraining import vocabulary
from nebula_jax import errors
from nebula_jax.data import tokenizers
from nebula_jax.data.tokenizers import vocabulary as vocabularies

GROUPS = [["en", "de"], ["sw"]]
MIXES = [{"mrtd": 1.0, "trtd": 0.0}] * 2


@pytest.fixture
def local(tmp_path):
    """Makes the settings of a process that has text."""
    text = tiny_runs.write_text(tmp_path / "text")

    def made(**given):
        common = {"data_dir": text, "prepared_dir": tmp_path / "p", "vocab_size": 60}
        return configured.run(config, **common | given).local

    return made


def test_a_cluster_that_runs_alone_is_given_one(local, tmp_path):
    with pytest.raises(errors.SettingsError, match="cluster:1 needs --vocabulary"):
        vocabulary.given(local(cluster="1"))
    path = tmp_path / "v.model"
    vocabularies.train([f"the {n} doors" for n in range(200)], 50, path)
    assert vocabulary.given(local(vocabulary=path)).path == path
    assert vocabulary.shared(local(vocabulary=path), GROUPS, MIXES) == path


def test_it_is_made_again_only_for_another_text_or_size(local, tmp_path):
    first = vocabulary.shared(local(), GROUPS, MIXES)
    assert first.parent == tmp_path / "p"
    assert vocabularies.load(first).size == 60
    before = first.stat()
    assert vocabulary.shared(local(), GROUPS, MIXES) == first
    assert vocabulary.shared(local(), [["en", "de", "sw"]], MIXES[:1]) == first
    assert first.stat() == before
    others = {
        vocabulary.shared(local(vocab_size=50), GROUPS, MIXES),
        vocabulary.shared(local(), [["en"]], MIXES[:1]),
    }
    with (tmp_path / "text/mono/sw.train.txt").open("a") as stream:
        stream.write("mlango mmoja zaidi\n")
    others.add(vocabulary.shared(local(), GROUPS, MIXES))
    assert len(others - {first}) == 3


def test_each_language_says_what_is_left_of_its_text(local, tmp_path, capfd):
    with (tmp_path / "text/mono/sw.train.txt").open("a") as stream:
        stream.write("\u200b\n" + "mlango " * 700 + "\n")
    vocabulary.make(local(), ["en", "de", "sw"], tmp_path / "v.model")
    said = "".join(capfd.readouterr())
    assert "sw: 152 lines; 1 were cut for the vocabulary, 1 have no text" in said
    assert "en: 150 lines; 0 were cut for the vocabulary, 0 have no text" in said


def test_text_with_a_bad_line_makes_none(local, tmp_path):
    with (tmp_path / "text/mono/sw.valid.txt").open("a") as stream:
        stream.write("\n")
    with pytest.raises(errors.NebulaError, match=r"sw\.valid\.txt:31: empty line"):
        vocabulary.shared(local(), GROUPS, MIXES)
    assert not list(tmp_path.glob("p/vocabulary-*"))


def test_with_a_hot_start_it_is_the_pieces_that_the_text_has_most(local, tmp_path):
    checkpoint = tiny_hot_start.write_model(tmp_path / "bert")
    whole = tokenizers.load(checkpoint)
    path = vocabulary.shared(local(hot_start=checkpoint), GROUPS, MIXES)
    made = vocabularies.load(path)
    assert made.size < whole.size
    assert np.all(np.isin(made.rows, np.arange(whole.size)))
    kept = {whole.library.pieces[row] for row in made.rows}
    assert {"the", "house", "das", "ina"} <= kept
    assert not kept & set(tiny_hot_start.UNSAID)
    size = vocabulary.make(
        local(hot_start=checkpoint, vocab_size=32), ["en"], tmp_path / "en"
    )
    assert size == vocabularies.load(tmp_path / "en").size
