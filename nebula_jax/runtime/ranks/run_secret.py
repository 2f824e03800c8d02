"""The secret of a run, by which the processes of a cluster know each other.

It is in a variable of the environment, or in a file of the run's folder that the first
process makes, whichever that is: then all hosts share the disk of that folder.
"""

import contextlib
import os
import pathlib
import secrets
import tempfile

from nebula_jax import errors
from nebula_jax.security import private_files

VARIABLE = "NEBULA_CLUSTER_KEY"
FILE = "cluster.key"
LEAST = 32  # characters


def of_run(folder: pathlib.Path) -> bytes:
    """Returns the secret, which is made if there is none.

    Raises errors.SettingsError if it is too short, or can be neither read nor made.
    """
    if given := os.environ.get(VARIABLE):
        if len(given) < LEAST:
            raise errors.SettingsError(
                f"{VARIABLE} in the environment has {len(given)} characters; {LEAST}"
                " random ones are needed, as of: openssl rand -hex 32"
            )
        return os.fsencode(given)
    path = folder / FILE
    try:
        if not path.exists():
            _make(path)
        found = private_files.read(path).strip()
    except (OSError, private_files.PrivateFileError) as error:
        raise errors.SettingsError(
            f"workdir: this run's secret: {error}; or give all processes of the cluster"
            f" the same {VARIABLE} in the environment"
        ) from None
    if len(found) < LEAST:
        raise errors.SettingsError(f"workdir: {path}: holds no secret; delete it")
    return found.encode()


def _make(path: pathlib.Path) -> None:
    """Makes the file, whole; of several processes that do so, one has made it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{FILE}.", dir=path.parent) as folder:
        own = pathlib.Path(folder) / FILE
        private_files.write(own, secrets.token_hex(32) + "\n")
        with contextlib.suppress(FileExistsError):
            os.link(own, path)
