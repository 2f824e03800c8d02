import pytest
from absl.testing import flagsaver

from nebula_jax import errors
from nebula_jax.data import parallel_side
from scripts import split_parallel


def test_two_folders_are_written_and_described(tmp_path, capsys):
    text, out = tmp_path / "text", tmp_path / "sides"
    (text / "parallel").mkdir(parents=True)
    for split in parallel_side.SPLITS:
        rows = [f"word {n}\tneno {n}\t{'ab'[n % 2]}\n" for n in range(8)]
        path = text / "parallel" / f"en-sw.{split}.tsv"
        path.write_text("en\tsw\tsource\n" + "".join(rows))
    values = {"data_dir": str(text), "out": str(out), "pair": "sw-en"}
    with flagsaver.flagsaver(**values, corpora=["a"], max_pairs=3, held_out_pairs=1):
        assert split_parallel.main() == 0
        assert split_parallel.main() == 0
    assert capsys.readouterr().out.splitlines()[:2] == [
        f"{out}/source: sw, train 3, dev 8, test 8, held_out 1",
        f"{out}/target: en, train 3, dev 8, test 8, held_out 1",
    ]
    assert parallel_side.read(out / "source/test.tsv.gz").texts[0] == "neno 0"
    words = "--out=FOLDER is needed"
    with flagsaver.flagsaver(out=""), pytest.raises(errors.SettingsError, match=words):
        split_parallel.main()
