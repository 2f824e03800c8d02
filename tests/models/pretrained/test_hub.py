"""Models of Hugging Face's hub, in a folder laid out as its cache; no network."""

import sys

import huggingface_hub
import pytest
import tiny_nli
from huggingface_hub import constants, utils

from nebula_jax import installed
from nebula_jax.models import pretrained
from nebula_jax.models.pretrained import packages

COMMIT = "e73636d4f797dec63c3081bb6ed5c7b0bb3f2089"
NAME = f"hf:org/tiny@{COMMIT}"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The cache, with one model, whose files are links to `blobs`."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    packages.fetch.cache_clear()
    model = tmp_path / "models--org--tiny"
    blobs = tiny_nli.write_model(model / "blobs")
    snapshot = model / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for blob in blobs.iterdir():
        (snapshot / blob.name).symlink_to(f"../../blobs/{blob.name}")
    return snapshot


def test_a_model_in_the_cache_is_read_wherever_a_folder_is(cache, tmp_path):
    folder = packages.resolve_checkpoint(NAME, tmp_path / "pretrained")
    assert folder == cache
    model, tokenizer = pretrained.load_with_tokenizer(folder)
    assert model.config.vocab_size == tokenizer.size
    assert not (tmp_path / "pretrained").exists()


@pytest.mark.parametrize(
    "name", ["hf:org/tiny", "hf:org/tiny@main", f"hf:tiny@{COMMIT}", NAME[:-1]]
)
def test_a_name_that_may_move_is_refused(cache, name, tmp_path):
    with pytest.raises(pretrained.PretrainedError, match="40 hexadecimal digits"):
        packages.resolve_checkpoint(name, tmp_path)


def test_without_a_network_a_missing_model_is_named_in_a_line(cache):
    name = NAME.replace("tiny", "other")
    with pytest.raises(pretrained.PretrainedError) as caught:
        packages.fetch(name)
    message = str(caught.value)
    assert message.startswith(f"{name} is not in the cache ({cache.parents[2]})")
    assert "HF_HUB_OFFLINE" in message
    assert "\n" not in message


def test_attempts_without_an_answer_are_not_told_one_by_one(cache, monkeypatch, caplog):
    def snapshot_download(*args, **values):
        utils.logging.get_logger("huggingface_hub.utils._http").warning("Retrying")
        raise OSError("no network")

    utils.logging.set_verbosity_warning()  # the library's default
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(pretrained.PretrainedError, match="no network"):
        packages.fetch(NAME)
    assert not caplog.records


def test_only_safetensors_are_asked_for_and_read(cache, monkeypatch):
    asked = []

    def download(repository, revision, allow_patterns):
        asked.append((repository, revision))
        wanted = ["config.json", "model-00001-of-2.safetensors", "vocab.txt"]
        others = ["pytorch_model.bin", "modeling_tiny.py", "onnx/model.onnx"]
        kept = utils.filter_repo_objects(wanted + others, allow_patterns=allow_patterns)
        assert list(kept) == wanted
        return str(cache)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    (cache / "model.safetensors").rename(cache / "pytorch_model.bin")
    with pytest.raises(pretrained.PretrainedError, match=r"no model\.safetensors at"):
        packages.fetch(NAME)
    assert asked == [("org/tiny", COMMIT)]


def test_without_the_library_its_extra_is_named(monkeypatch):
    packages.fetch.cache_clear()
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(installed.MissingExtra, match=r"nebula_jax\[experiments\]"):
        packages.fetch(NAME)
