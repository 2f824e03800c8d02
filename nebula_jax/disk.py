"""The operations on a disk that checkpoints are made of.

A simulated disk can take the place of these functions. What fails raises OSError.
"""

import hashlib
import os
import pathlib
import shutil


def names(folder: pathlib.Path) -> list[str]:
    """Returns what a folder holds, sorted; [] if there is no such folder."""
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []


def files(folder: pathlib.Path) -> list[str]:
    """Returns the files in a folder and below, relative to it, sorted."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path.relative_to(folder).as_posix() for path in found)


def read(path: pathlib.Path) -> bytes:
    """Returns the bytes of a file."""
    return path.read_bytes()


def digest(path: pathlib.Path) -> str:
    """Returns the SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write(path: pathlib.Path, data: bytes) -> None:
    """Writes a file over an older one. A crash may leave any part of it."""
    path.write_bytes(data)


def sync(path: pathlib.Path) -> None:
    """Returns when a file's bytes, or a folder's names, would outlive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_all(path: pathlib.Path) -> None:
    """Syncs a file, or a folder with all that is in it."""
    if path.is_dir():
        for name in names(path):
            sync_all(path / name)
    sync(path)


def rename(old: pathlib.Path, new: pathlib.Path) -> None:
    """Renames a file or a folder at once; durable when the folder around is synced.

    A file replaces an older one, a folder at most an empty one.
    """
    old.rename(new)


def remove(path: pathlib.Path) -> None:
    """Removes a file, or a folder with all that is in it, file by file."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def make_folder(path: pathlib.Path) -> None:
    """Makes a folder and those around it, each durable, unless they are there."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync(path.parent)
