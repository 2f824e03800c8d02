"""Checkpoints of one cluster: written whole, verified before use (orbax).

    FOLDER/00000040/          an orbax checkpoint: the state, and the data position
    FOLDER/00000040.json      SHA-256 of every file in it, written last

A checkpoint without its manifest, or with a file that differs from it, does not count.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp
from absl import logging

from nebula_jax import errors

_STEP = re.compile(r"(\d{8})(\.json)?")


class CheckpointError(errors.NebulaError):
    """A checkpoint could not be written, or is of another run."""


def save(
    folder: pathlib.Path, step: int, state: Any, about: dict[str, Any], keep: int
) -> None:
    """Writes the checkpoint of `step`, then drops all but the newest `keep`.

    Args:
      folder: of this cluster's checkpoints.
      step: optimisation steps taken.
      state: pytree of arrays.
      about: JSON values to come back with it: the data position, the settings.
      keep: how many to keep.

    Raises:
      CheckpointError: if it cannot be written, such as on a full disk. What was there
        before stays.
    """
    path, manifest = _paths(folder, step)
    partial = manifest.with_suffix(".partial")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        discard(folder, step)
        _check_room(folder, state)
        with _checkpointer() as checkpointer:
            checkpointer.save(
                path.absolute(),
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state), about=ocp.args.JsonSave(about)
                ),
            )
        with partial.open("w") as stream:
            json.dump(_digests(path), stream, indent=1)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, manifest)
    except Exception as error:  # orbax and tensorstore raise many kinds
        for leftover in folder.glob(f"{path.name}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        partial.unlink(missing_ok=True)
        raise CheckpointError(
            f"could not save step {step} in {folder}: {_reason(error)}"
        ) from None
    for old in _steps(folder)[:-keep]:
        discard(folder, old)


def _check_room(folder: pathlib.Path, state: Any) -> None:
    """Raises OSError if the disk cannot hold the state.

    A write that fails half-way is caught too, but tensorstore's threads then print
    tracebacks of their own.
    """
    needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(
            f"No space left on device: {needed / 1e6:.1f} MB are needed,"
            f" {free / 1e6:.1f} MB are free"
        )


def verified_steps(folder: pathlib.Path, log: Callable[[str], None]) -> list[int]:
    """Steps whose checkpoint is whole, ascending; tells `log` about the others."""
    good = []
    for step in _steps(folder):
        damage = _damage(*_paths(folder, step))
        if damage:
            log(f"checkpoint of step {step} in {folder} is damaged ({damage}); unused")
        else:
            good.append(step)
    return good


def restore(folder: pathlib.Path, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
    """Reads a verified checkpoint.

    Args:
      folder: of this cluster's checkpoints.
      step: one of `verified_steps`.
      like: pytree of ShapeDtypeStructs with shardings; where the arrays go.

    Returns:
      The state and what was saved about it.

    Raises:
      CheckpointError: if the checkpoint has another structure.
    """
    path, _ = _paths(folder, step)
    try:
        with _checkpointer() as checkpointer:
            restored = checkpointer.restore(
                path.absolute(),
                args=ocp.args.Composite(
                    state=ocp.args.StandardRestore(like), about=ocp.args.JsonRestore()
                ),
            )
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise CheckpointError(f"cannot use {path}: {_reason(error)}") from None
    return restored["state"], restored["about"]


def read(folder: pathlib.Path, step: int) -> Any:
    """The state of a verified checkpoint as nested dicts of arrays on the host.

    For a reader who wants parts of it and has nothing to compare it with.

    Raises:
      CheckpointError: if it cannot be read.
    """
    path, _ = _paths(folder, step)
    try:
        with _checkpointer() as checkpointer:
            arguments = ocp.args.Composite(state=ocp.args.StandardRestore())
            return checkpointer.restore(path.absolute(), args=arguments)["state"]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise CheckpointError(f"cannot use {path}: {_reason(error)}") from None


def newest_about(folder: pathlib.Path) -> dict[str, Any]:
    """What was saved about the newest finished checkpoint; {} if there is none."""
    for step in reversed(_steps(folder)):
        path, _ = _paths(folder, step)
        try:
            with _checkpointer() as checkpointer:
                arguments = ocp.args.Composite(about=ocp.args.JsonRestore())
                return checkpointer.restore(path.absolute(), args=arguments)["about"]
        except (ValueError, KeyError, TypeError, OSError):
            continue  # damaged: `verified_steps` will say so
    return {}


def discard(folder: pathlib.Path, step: int) -> None:
    """Removes a checkpoint, manifest first, so that it never half counts."""
    path, manifest = _paths(folder, step)
    manifest.unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def discard_after(folder: pathlib.Path, step: int) -> None:
    """Removes what lies beyond the step that a run goes on from, and torn leftovers."""
    for path in folder.glob("*.orbax-checkpoint-tmp*"):
        shutil.rmtree(path, ignore_errors=True)
    for later in _all_steps(folder):
        if later > step:
            discard(folder, later)


def abstract(state: Any, sharding: Any) -> Any:
    """`like` for `restore`: shapes and dtypes of `state` with a tree of shardings."""
    return jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=where
        ),
        state,
        sharding,
    )


@contextlib.contextmanager
def _checkpointer() -> Iterator[ocp.Checkpointer]:
    """Orbax without its tracebacks: what goes wrong is raised, and said once."""
    before = logging.get_verbosity()
    logging.set_verbosity(logging.FATAL)
    try:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            yield checkpointer
    finally:
        logging.set_verbosity(before)


def _reason(error: Exception) -> str:
    """The cause in a few words: the last part of tensorstore's long messages."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if isinstance(error, OSError):
        return error.strerror or lines[0]
    return lines[0].rsplit(": ", 1)[-1].partition(" [")[0]


def _paths(folder: pathlib.Path, step: int) -> tuple[pathlib.Path, pathlib.Path]:
    return folder / f"{step:08d}", folder / f"{step:08d}.json"


def _all_steps(folder: pathlib.Path) -> list[int]:
    """Every step that left any trace."""
    if not folder.is_dir():
        return []
    matches = (_STEP.fullmatch(path.name) for path in folder.iterdir())
    return sorted({int(match[1]) for match in matches if match})


def _steps(folder: pathlib.Path) -> list[int]:
    """Steps that have a manifest."""
    return [step for step in _all_steps(folder) if _paths(folder, step)[1].is_file()]


def _digest(file: pathlib.Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _digests(path: pathlib.Path) -> dict[str, str]:
    files = (file for file in sorted(path.rglob("*")) if file.is_file())
    return {str(file.relative_to(path)): _digest(file) for file in files}


def _damage(path: pathlib.Path, manifest: pathlib.Path) -> str:
    """In words, what of a checkpoint is not as it was written; empty if nothing."""
    try:
        expected = json.loads(manifest.read_text())
    except (OSError, ValueError):
        return "its manifest cannot be read"
    for name, digest in expected.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if _digest(file) != digest:
            return f"{name} differs from what was written"
    return ""
