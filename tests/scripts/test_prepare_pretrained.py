import pytest
import tiny_nli
from absl.testing import flagsaver

from nebula_jax import errors
from nebula_jax.models import pretrained
from scripts import prepare_pretrained


@pytest.fixture
def checkpoint(tmp_path):
    """A folder of one's own: a random BERT and its vocab.txt."""
    return tiny_nli.write_model(tmp_path / "mine", words=["a"], layers=1)


def run(**values):
    with flagsaver.flagsaver(**values):
        return prepare_pretrained.main()


def test_a_folder_of_ones_own_is_checked_and_described(checkpoint, tmp_path, capsys):
    before = sorted(path.name for path in checkpoint.iterdir())
    assert run(model=[str(checkpoint)], pretrained_dir=str(tmp_path / "none")) == 0
    said = capsys.readouterr().out
    assert f"{checkpoint}: bert, 1 layers of width 16" in said
    assert "tokenizer of 9 pieces, digest " in said
    assert sorted(path.name for path in checkpoint.iterdir()) == before
    assert not (tmp_path / "none").exists()


def test_a_folder_without_a_tokenizer_is_described_too(checkpoint, capsys):
    (checkpoint / "vocab.txt").unlink()
    assert run(model=[str(checkpoint)]) == 0
    said = capsys.readouterr().out
    assert "1 layers of width 16" in said
    assert "; no tokenizer beside it, which training needs" in said


def test_nothing_asked_for_is_an_error_that_says_what_there_is():
    with pytest.raises(errors.SettingsError, match="e5-small, minilm-l6"):
        run(model=[])
    with pytest.raises(pretrained.PretrainedError, match="e6: no such model"):
        run(model=["e6"])
