"""Files: their digests, and writing one whole or not at all."""

import contextlib
import hashlib
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from nebula_jax import disk


def digest(path: pathlib.Path) -> str:
    """Computes the SHA-256 of a file's bytes, in hexadecimal."""
    return disk.digest(path)


def digest_of(values: Sequence[Any]) -> str:
    """Computes a digest of values, 12 hexadecimal digits for names of derived files.

    Their `repr` has to give all of them, as of numbers, strings and lists.
    """
    return hashlib.sha256(repr(values).encode()).hexdigest()[:12]


@contextlib.contextmanager
def writing(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a path to write to, which becomes `path` when the block ends.

        with files.writing(folder / "summary.json") as partial:
            partial.write_text(text, "utf-8")

    If the block raises, nothing is left and `path` is as it was. A file replaces
    another at once. A folder, made by the block, replaces an empty one at most. The
    path yielded has the same name, on the same disk. Missing parents are made. Raises
    OSError if the disk does not take it, or at `path` is a folder with anything in it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=f".{path.name}.", suffix=".partial", dir=path.parent
    ) as folder:
        partial = pathlib.Path(folder) / path.name
        yield partial
        disk.sync_all(partial)  # else a power cut may leave it empty
        disk.rename(partial, path)
        disk.sync(path.parent)


@contextlib.contextmanager
def replacing(
    folder: pathlib.Path, log: Callable[[str], None]
) -> Iterator[pathlib.Path]:
    """Yields a path to make a folder at, which replaces `folder` when the block ends.

    An older folder whose files differ is kept beside it, as `NAME.former`, and `log`
    takes a message for a person. For the rest see `writing`.
    """
    with writing(folder) as partial:
        yield partial
        if not disk.names(folder):
            return
        if _digests(folder) == _digests(partial):
            former = partial.with_name("former")  # which is removed with the rest
        else:
            former, number = folder.with_name(f"{folder.name}.former"), 1
            while former.exists():
                number += 1
                former = folder.with_name(f"{folder.name}.former-{number}")
            log(f"{folder}: what was there differs; it is kept as {former.name}")
        disk.rename(folder, former)


def _digests(folder: pathlib.Path) -> dict[str, str]:
    return {name: disk.digest(folder / name) for name in disk.files(folder)}
