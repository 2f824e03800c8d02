"""A checkpoint as Hugging Face lays it out: a folder of config.json, model.safetensors.

A large model's tensors may be in several files, named by model.safetensors.index.json.
Files that hold Python pickles (pytorch_model.bin, model_state.pdparams) are never read.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from nebula_jax import errors

CONFIG = "config.json"
TENSORS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("pytorch_model.bin", "model_state.pdparams", "flax_model.msgpack")


class PretrainedError(errors.NebulaError):
    """A pretrained model is missing, damaged, or not what its config says."""


def read_config(folder: pathlib.Path) -> dict[str, Any]:
    """config.json.

    Raises:
      PretrainedError: if there is none, or it is no JSON object.
    """
    if not folder.is_dir():
        raise PretrainedError(f"{folder} is no folder")
    config = read_json(folder / CONFIG)
    if not isinstance(config, dict):
        raise PretrainedError(f"{folder / CONFIG} is no JSON object")
    return config


def read_json(path: pathlib.Path) -> Any:
    """A JSON file; PretrainedError if it is missing or no JSON."""
    try:
        return json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise PretrainedError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise PretrainedError(f"{path} is no JSON: {error}") from None


def read_tensors(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """All tensors, by the names they have in the files.

    Raises:
      PretrainedError: if there are none, or a file is damaged or cut short.
    """
    if (folder / TENSORS).exists():
        return _read(folder / TENSORS)
    if (folder / INDEX).exists():
        index = read_json(folder / INDEX)
        try:
            parts = sorted({str(part) for part in index["weight_map"].values()})
        except (AttributeError, KeyError, TypeError):
            raise PretrainedError(f"{folder / INDEX} has no weight_map") from None
        tensors = {}
        for part in parts:
            if pathlib.PurePath(part).name != part:
                raise PretrainedError(f"{folder / INDEX} names a file outside: {part}")
            tensors |= _read(folder / part)
        return tensors
    found = [name for name in PICKLES if (folder / name).exists()]
    hint = f"; {found[0]} is there, but only safetensors are read" if found else ""
    raise PretrainedError(f"{folder} has no {TENSORS}{hint}")


@contextlib.contextmanager
def replacing(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder to write into, which takes the place of `folder` when all is written."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    yield partial
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def digest(folder: pathlib.Path) -> str:
    """SHA-256 of config.json and of the files that hold tensors, as hexadecimals.

    Raises:
      PretrainedError: if there are none.
    """
    names = sorted(
        {CONFIG, INDEX, *(path.name for path in folder.glob("*.safetensors"))}
    )
    hashed = hashlib.sha256()
    for name in names:
        if (folder / name).exists():
            with (folder / name).open("rb") as stream:
                hashed.update(hashlib.file_digest(stream, "sha256").digest())
    if len(names) < 3:
        raise PretrainedError(f"{folder} has no {TENSORS}")
    return hashed.hexdigest()


def _read(path: pathlib.Path) -> dict[str, np.ndarray]:
    try:
        return safetensors.numpy.load_file(path)
    except OSError as error:
        raise PretrainedError(f"{path}: {error.strerror or error}") from None
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise PretrainedError(
            f"{path} is no whole safetensors file: {reason}"
        ) from None


def write(
    folder: pathlib.Path, config: dict[str, Any], tensors: dict[str, np.ndarray]
) -> None:
    """Writes both files; the config last, so that half a folder is no checkpoint.

    Args:
      folder: made if missing.
      config: JSON values.
      tensors: float32 arrays by name.

    Raises:
      PretrainedError: if the disk does not take them.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG).unlink(missing_ok=True)
        partial = folder / f"{TENSORS}.partial"
        safetensors.numpy.save_file(
            {name: np.ascontiguousarray(array) for name, array in tensors.items()},
            partial,
            metadata={"format": "pt"},  # transformers refuses a file without it
        )
        partial.chmod(0o644)  # safetensors makes files that only their owner can read
        os.replace(partial, folder / TENSORS)
        write_json(folder / CONFIG, config)
    except (OSError, safetensors.SafetensorError) as error:
        raise PretrainedError(f"cannot write {folder}: {error}") from None


def write_json(path: pathlib.Path, value: Any) -> None:
    """Writes a JSON file, readable by a person."""
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", "utf-8")
