"""The folder of a run, and in it a folder for each cluster."""

import contextlib
import fcntl
import json
import pathlib
from collections.abc import Iterator

from nebula_jax import errors
from nebula_jax.security import names
from nebula_jax.training import metrics

EVALUATED = "evaluated"  # folder in a run's own of what later evaluations find


def of_cluster(workdir: pathlib.Path, cluster: str) -> pathlib.Path:
    """Returns a cluster's folder: `generator:0` -> <workdir>/generator-0."""
    return workdir / names.label(cluster)


def clusters(workdir: pathlib.Path) -> dict[str, pathlib.Path]:
    """Returns name -> folder of the clusters that have metrics in a run's folder.

    A name is known once the cluster has ended; until then it is the folder's.
    """
    found = {}
    for path in sorted(workdir.glob(f"*/{metrics.FILE}")):
        about = path.with_name("summary.json")
        ended = json.loads(about.read_text("utf-8")) if about.is_file() else {}
        found[ended.get("cluster", path.parent.name)] = path.parent
    return found


@contextlib.contextmanager
def lock(folder: pathlib.Path) -> Iterator[None]:
    """Holds a folder, made if it is missing, for this process alone.

    If nothing comes to be in it, as when the start is refused, nothing is left. Raises
    errors.SettingsError if it is a file, or in one, or not this user's to write;
    errors.NebulaError if another process works in it.
    """
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    path = folder / ".lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        opened = path.open("w")
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise errors.SettingsError(
            f"cannot work in {folder}: {error.strerror}; name another workdir"
        ) from None
    with opened as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise errors.NebulaError(
                f"another process works in {folder}; wait for it, or name another"
                " workdir"
            ) from None
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # the folder is in use, or lost
                if made and list(folder.iterdir()) == [path]:
                    path.unlink()
                for each in made:
                    each.rmdir()
