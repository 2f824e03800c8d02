"""A checkpoint as Hugging Face lays it out: a folder of config.json, model.safetensors.

A large model's tensors may be in several files, named by model.safetensors.index.json.
Files that hold Python pickles (pytorch_model.bin, model_state.pdparams) are never read.
"""

import hashlib
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from nebula_jax import errors, files, installed

CONFIG = "config.json"
TENSORS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHOWN = 4  # names in a message
PICKLES = ("pytorch_model.bin", "model_state.pdparams", "flax_model.msgpack")


class PretrainedError(errors.NebulaError):
    """A pretrained model that is missing, damaged, or another than its config's."""


def read_config(folder: pathlib.Path) -> dict[str, Any]:
    """Reads config.json; PretrainedError if there is none, or it is no JSON object."""
    if not folder.is_dir():
        raise PretrainedError(f"{folder} is no folder")
    config = read_json(folder / CONFIG)
    if not isinstance(config, dict):
        raise PretrainedError(f"{folder / CONFIG} is no JSON object")
    return config


def read_json(path: pathlib.Path) -> Any:
    """Reads a JSON file; raises PretrainedError if it is missing or no JSON."""
    try:
        return json.loads(path.read_text("utf-8-sig"))
    except OSError as error:
        raise PretrainedError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # the latter of deep nesting
        raise PretrainedError(f"{path} is no JSON: {error}") from None


def read_tensors(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """Reads all tensors by name; PretrainedError if none, damaged or cut short."""
    if (folder / TENSORS).exists():
        return _read(folder / TENSORS)
    if (folder / INDEX).exists():
        return _read_parts(folder)
    found = [name for name in PICKLES if (folder / name).exists()]
    hint = f"; {found[0]} is there, but only safetensors are read" if found else ""
    raise PretrainedError(f"{folder} has no {TENSORS}{hint}")


def _read_parts(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """Reads the files of an index, of which each has the tensors that it names."""
    index = read_json(folder / INDEX)
    try:
        places = {name: str(part) for name, part in index["weight_map"].items()}
    except (AttributeError, KeyError, TypeError):
        raise PretrainedError(f"{folder / INDEX} has no weight_map") from None
    tensors: dict[str, np.ndarray] = {}
    for part in sorted(set(places.values())):
        if pathlib.PurePath(part).name != part:
            raise PretrainedError(f"{folder / INDEX} names a file outside: {part}")
        read = _read(folder / part)
        apart = read.keys() ^ {name for name in places if places[name] == part}
        if apart:
            raise PretrainedError(
                f"{folder / part} has other tensors than {INDEX} gives it:"
                f" {first_few(sorted(apart))}"
            )
        tensors |= read
    return tensors


def first_few(names: Sequence[str]) -> str:
    """Returns the first names of a list, and how many others there are."""
    more = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def digest(folder: pathlib.Path) -> str:
    """Computes the SHA-256 of a model's files in hex; PretrainedError without any."""
    names = sorted(
        {CONFIG, INDEX, *(path.name for path in folder.glob("*.safetensors"))}
    )
    hashed = hashlib.sha256()
    for name in names:
        if (folder / name).exists():
            hashed.update(bytes.fromhex(files.digest(folder / name)))
    if len(names) < 3:
        raise PretrainedError(f"{folder} has no {TENSORS}")
    return hashed.hexdigest()


def _read(path: pathlib.Path) -> dict[str, np.ndarray]:
    with installed.extra("experiments"):
        import safetensors.numpy
    try:
        return safetensors.numpy.load_file(path)
    except OSError as error:
        raise PretrainedError(f"{path}: {error.strerror or error}") from None
    except AttributeError as error:  # "module 'numpy' has no attribute 'float8_e5m2'"
        kind = str(error).rpartition(" ")[2].strip("'")
        raise PretrainedError(
            f"{path} has tensors in {kind}; convert them to float32 or bfloat16"
        ) from None
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise PretrainedError(
            f"{path} is no whole safetensors file: {reason}"
        ) from None


def write(
    folder: pathlib.Path, config: dict[str, Any], tensors: dict[str, np.ndarray]
) -> None:
    """Writes both files; the config last, so that half a folder is no checkpoint.

    `tensors` are float32 arrays by name; PretrainedError if the disk refuses.
    """
    with installed.extra("experiments"):
        import safetensors.numpy
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG).unlink(missing_ok=True)
        with files.writing(folder / TENSORS) as partial:
            # safetensors makes files for their owner alone: the umask decides, as for
            # other files.
            partial.touch()
            mode = partial.stat().st_mode
            safetensors.numpy.save_file(
                {name: np.ascontiguousarray(array) for name, array in tensors.items()},
                partial,
                metadata={"format": "pt"},  # transformers refuses a file without it
            )
            partial.chmod(mode)
        write_json(folder / CONFIG, config)
    except (OSError, safetensors.SafetensorError) as error:
        raise PretrainedError(f"cannot write {folder}: {error}") from None


def write_json(path: pathlib.Path, value: Any) -> None:
    """Writes a JSON file, readable by a person."""
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
    path.write_text(text + "\n", "utf-8")
