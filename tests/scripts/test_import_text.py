"""Text of other formats becomes a folder that the experiments read."""

import json

import configured
import pytest
from absl.testing import flagsaver

from experiments.m3 import config as m3_config
from experiments.m3 import data as m3_data
from nebula_jax import errors
from nebula_jax.data import language_mixture, parallel_side, split_parallel
from nebula_jax.data.tokenizers import vocabulary as vocabularies
from scripts import import_text


def imported(out, languages, *inputs, **more):
    given = {"input": list(map(str, inputs)), "languages": languages, "out": str(out)}
    with flagsaver.flagsaver(**given, **more):
        return import_text.main()


@pytest.fixture
def text(tmp_path, capsys):
    """A folder of German and French, and their pair, without a word of English."""
    for language, sentence in (("de", "das Haus {}"), ("fr", "la maison {}")):
        lines = [json.dumps({"text": sentence.format(n)}) for n in range(60)]
        (tmp_path / f"{language}.jsonl").write_text("\n".join([*lines, "{", ""]))
        lines = [f"{sentence.format(n)} est\n" for n in range(60)]
        (tmp_path / f"corpus.{language}").write_text("".join([*lines, "\n"]))
        out = tmp_path / "text"
        assert imported(out, [language], tmp_path / f"{language}.jsonl") == 0
    corpus = [tmp_path / f"corpus.{language}" for language in ("de", "fr")]
    assert imported(out, ["de", "fr"], *corpus) == 0
    assert "1 undecodable" in capsys.readouterr().out
    return out


def test_a_pair_without_english_is_one_that_m3_reads(text, tmp_path):
    values = {"generators": "de fr", "task_mix": "mrtd=1 trtd=1", "data_dir": text}
    values |= {"parallel_pairs": "de-fr", "vocab_size": 60, "prepared_dir": tmp_path}
    run = m3_data.checked(configured.run(m3_config, **values))
    vocabulary = vocabularies.load(m3_data.shared_vocabulary(run))
    read = m3_data.text_of(run, 0, vocabulary)
    read.begin(None, 4)
    assert next(read.batches).shape == (4, run.agreed.max_length)
    assert [each.name for each in read._sources][2:] == ["parallel/de-fr"]
    with pytest.raises(errors.NebulaError, match=r"the pair 'en-de' has no text"):
        m3_data.checked(run.with_agreed(parallel_pairs=()))
    with pytest.raises(language_mixture.MixtureError, match="'de-en' is no pair such"):
        m3_data.checked(run.with_agreed(parallel_pairs=("de-en",)))


@pytest.mark.parametrize("languages", [("de", "fr"), ("fr", "de")])
def test_abnet_translates_it_in_both_directions(text, tmp_path, languages):
    folders = split_parallel.split(text, languages, tmp_path / "sides")
    sides = [parallel_side.read(parallel_side.path(each, "train")) for each in folders]
    assert sides[0].ids == sides[1].ids
    assert ["Haus" in side.texts[0] for side in sides] == [
        language == "de" for language in languages
    ]


@pytest.mark.parametrize(
    ("languages", "more", "words"),
    [
        (["all"], {}, "languages=all: expected one such as de or pt_BR, or a pair"),
        (["de", "de"], {}, "languages=de,de: expected one"),
        (["../x"], {}, "expected one such as de"),
        (["de"], {"to_split": "dev"}, "to_split=dev: text of de has train, valid"),
        (["de"], {"input": []}, "input=FILE is needed"),
        (["de"], {"out": ""}, "out=FOLDER is needed"),
    ],
)
def test_bad_flags_are_explained(tmp_path, languages, more, words):
    given = {"input": ["x"], "languages": languages, "out": str(tmp_path)} | more
    with flagsaver.flagsaver(**given), pytest.raises(errors.NebulaError, match=words):
        import_text.main()
