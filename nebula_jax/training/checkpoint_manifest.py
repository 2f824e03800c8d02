"""The manifest of a checkpoint: its step, its metadata, digests of its files.

A file of JSON in the checkpoint's own folder, so that the two cannot be parted, with a
digest of itself.
"""

import hashlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from nebula_jax import disk as real_disk

NAME = "manifest.json"


class Manifest(NamedTuple):
    """The metadata of a checkpoint and the digests of its files."""

    about: dict[str, Any]
    """Metadata: JSON values."""
    files: dict[str, str]
    """Path of a file, relative to the checkpoint -> SHA-256 in hexadecimal."""


def encode(step: int, about: Mapping[str, Any], digests: Mapping[str, str]) -> bytes:
    """Encodes a manifest.

    Args:
      digests: file -> SHA-256 in hexadecimal.
    """
    content = {"step": step, "about": dict(about), "files": dict(digests)}
    content = json.loads(json.dumps(content))  # as it will be read: tuples are lists
    return json.dumps(content | {"digest": _digest(content)}, indent=1).encode()


def decode(data: bytes, step: int) -> Manifest:
    """Decodes a manifest.

    Args:
      data: from `encode`, or anything.
      step: that it must be of.

    Raises:
      ValueError: if it is not the manifest of that step; in words.
    """
    try:
        content = json.loads(data)
        digest = content.pop("digest")
        is_whole = digest == _digest(content)
        found = Manifest(dict(content["about"]), dict(content["files"]))
        of_step = content["step"]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ValueError(f"{NAME} is no manifest") from None
    if not is_whole:
        raise ValueError(f"{NAME} differs from what was written")
    if of_step != step:
        raise ValueError(f"{NAME} is that of step {of_step}")
    if not found.files:
        raise ValueError(f"{NAME} lists no files")
    return found


def read(folder: pathlib.Path, step: int, disk: real_disk.Disk) -> Manifest:
    """Reads the manifest of a checkpoint.

    Args:
      step: that it must be of.
      disk: where the folder is.

    Raises:
      ValueError: if it is damaged; in words.
      OSError: if it cannot be read.
    """
    if NAME not in disk.names(folder):
        raise ValueError(f"{NAME} is missing")
    return decode(disk.read(folder / NAME), step)


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
