import pytest
from absl import flags
from absl.testing import flagsaver

from nebula_jax import errors
from nebula_jax.data import parallel_side
from scripts import split_parallel


@pytest.fixture
def text_folder(tmp_path):
    folder = tmp_path / "text"
    (folder / "parallel").mkdir(parents=True)
    for split in parallel_side.SPLITS:
        rows = [f"word {n}\tneno {n}\t{'ab'[n % 2]}\n" for n in range(8)]
        path = folder / "parallel" / f"en-sw.{split}.tsv"
        path.write_text("en\tsw\tsource\n" + "".join(rows))
    return folder


def test_two_folders_are_written_and_described(text_folder, tmp_path, capsys):
    flags.FLAGS(["test"])
    out = tmp_path / "sides"
    values = {"data_dir": str(text_folder), "out": str(out), "pair": "sw-en"}
    with flagsaver.flagsaver(**values, corpora=["a"], max_pairs=3):
        assert split_parallel.main() == 0
        assert split_parallel.main() == 0
    assert capsys.readouterr().out.splitlines()[:2] == [
        f"{out}/source: sw, train 3, dev 8, test 8",
        f"{out}/target: en, train 3, dev 8, test 8",
    ]
    assert parallel_side.read(out / "source/test.tsv.gz").texts[0] == "neno 0"


def test_held_out_pairs_are_a_split_of_their_own(text_folder, tmp_path, capsys):
    flags.FLAGS(["test"])
    out = tmp_path / "sides"
    values = {"data_dir": str(text_folder), "out": str(out), "pair": "sw-en"}
    with flagsaver.flagsaver(**values, max_pairs=3, held_out_pairs=2):
        assert split_parallel.main() == 0
    assert "target: en, train 3, dev 8, test 8, held_out 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"out": ""}, "--out=FOLDER is needed"),
        ({"pair": "sw"}, "expected two, such as es-en"),
        ({"pair": "es-en"}, "the pair 'es-en' has no text"),
    ],
)
def test_bad_flags_are_explained(text_folder, tmp_path, values, words):
    flags.FLAGS(["test"])
    values = {"out": str(tmp_path / "x"), "data_dir": str(text_folder), **values}
    with flagsaver.flagsaver(**values), pytest.raises(errors.NebulaError, match=words):
        split_parallel.main()
    assert issubclass(errors.SettingsError, errors.NebulaError)
