import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver

from nebula_jax import errors
from nebula_jax.models import pretrained, transformer
from nebula_jax.models.pretrained import packages, tree
from scripts import prepare_pretrained

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]


@pytest.fixture
def checkpoint(tmp_path):
    """A folder of one's own: a random BERT and its vocab.txt."""
    config = transformer.Config(
        vocab_size=len(PIECES),
        layers=1,
        width=8,
        heads=2,
        feed_forward=8,
        max_length=6,
        token_types=2,
    )
    params: dict = {}
    for path, shape in tree.shapes(config).items():
        *parents, leaf = path.split("/")
        if parents[0] in ("embeddings", "encoder"):
            node = params
            for parent in parents:
                node = node.setdefault(parent, {})
            node[leaf] = np.ones(shape, np.float32)
    folder = tmp_path / "mine"
    pretrained.save(folder, pretrained.Pretrained("bert", config, params, {}))
    (folder / "vocab.txt").write_text("".join(piece + "\n" for piece in PIECES))
    return folder


def run(**values):
    flags.FLAGS(["test"])
    with flagsaver.flagsaver(**values):
        return prepare_pretrained.main()


def test_a_folder_of_ones_own_is_checked_and_described(checkpoint, tmp_path, capsys):
    before = sorted(path.name for path in checkpoint.iterdir())
    assert run(model=[str(checkpoint)], pretrained_dir=str(tmp_path / "none")) == 0
    said = capsys.readouterr().out
    assert f"{checkpoint}: bert, 1 layers of width 8" in said
    assert "tokenizer of 7 pieces, digest " in said
    assert sorted(path.name for path in checkpoint.iterdir()) == before
    assert not (tmp_path / "none").exists()


def test_a_folder_without_a_tokenizer_is_described_too(checkpoint, capsys):
    (checkpoint / "vocab.txt").unlink()
    assert run(model=[str(checkpoint)]) == 0
    said = capsys.readouterr().out
    assert "1 layers of width 8" in said
    assert "; no tokenizer beside it, which training needs" in said


def test_known_names_go_to_the_packages(monkeypatch, tmp_path, checkpoint, capsys):
    asked = []

    def prepare(name, folder, log):
        asked.append((name, folder, log))
        return checkpoint

    monkeypatch.setattr(packages, "prepare", prepare)
    run(model=["e5-small", "minilm-l6"], pretrained_dir=str(tmp_path / "p"))
    assert [name for name, _, _ in asked] == ["e5-small", "minilm-l6"]
    assert {folder for _, folder, _ in asked} == {tmp_path / "p"}
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_nothing_asked_for_is_an_error_that_says_what_there_is():
    with pytest.raises(errors.SettingsError, match="e5-small, minilm-l6"):
        run(model=[])
    with pytest.raises(pretrained.PretrainedError, match="e6: no such model"):
        run(model=["e6"])
