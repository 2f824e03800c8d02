"""Checkpoints of one cluster: written whole, verified before use (orbax).

    FOLDER/00000040/          an orbax checkpoint: the state, and the data position
    FOLDER/00000040.json      SHA-256 of every file in it, written last

A checkpoint without its manifest, or with a file that differs from it, does not count.

Retention is not left to `orbax.checkpoint.CheckpointManager(max_to_keep)`: it counts
steps that have no manifest yet, and removes good ones in their favor.
"""

import contextlib
import json
import pathlib
import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp
from absl import logging

from nebula_jax import errors, files

_STEP = re.compile(r"(\d{8})(\.json)?")


class CheckpointError(errors.NebulaError):
    """A checkpoint cannot be written, read, or used by this run."""


def save(
    folder: pathlib.Path, step: int, state: Any, about: dict[str, Any], keep: int
) -> None:
    """Writes the checkpoint of `step`, then removes all but the newest `keep`.

    Args:
      folder: of this cluster's checkpoints.
      step: optimisation steps taken.
      state: pytree of arrays.
      about: metadata, JSON values that `restore` returns: data position, settings.
      keep: how many to keep.

    Raises:
      CheckpointError: if it cannot be written, such as on a full disk. Earlier
        checkpoints stay.
    """
    path, manifest = _paths(folder, step)
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
        with files.writing(manifest) as partial:
            partial.write_text(json.dumps(_digests(path), indent=1))
    except Exception as error:  # orbax and tensorstore raise many kinds
        for leftover in folder.glob(f"{path.name}*"):
            shutil.rmtree(leftover, ignore_errors=True)
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
    """Returns the steps whose checkpoint is undamaged, ascending; logs the others."""
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
      like: pytree of ShapeDtypeStructs with shardings, see `abstract`.

    Returns:
      The state and its metadata.

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
    """Reads the state of a verified checkpoint as nested dicts of arrays on the host.

    For a reader that needs parts of it and has no state to compare it with.

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
    """Reads the metadata of the newest finished checkpoint; {} if there is none."""
    for step in reversed(_steps(folder)):
        path, _ = _paths(folder, step)
        try:
            with _checkpointer() as checkpointer:
                arguments = ocp.args.Composite(about=ocp.args.JsonRestore())
                return checkpointer.restore(path.absolute(), args=arguments)["about"]
        except (ValueError, KeyError, TypeError, OSError):
            continue  # damaged: `verified_steps` logs it
    return {}


def discard(folder: pathlib.Path, step: int) -> None:
    """Removes a checkpoint, manifest first, so that it never half counts."""
    path, manifest = _paths(folder, step)
    manifest.unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def discard_after(folder: pathlib.Path, step: int) -> None:
    """Removes checkpoints after the step at which a run resumes, and torn leftovers."""
    for pattern in ("*.orbax-checkpoint-tmp*", ".*.partial"):
        for path in folder.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)
    for later in _all_steps(folder):
        if later > step:
            discard(folder, later)


def abstract(state: Any, sharding: Any) -> Any:
    """Makes `like` for `restore`: shapes and dtypes of `state`, with shardings.

    Args:
      state: pytree of arrays or ShapeDtypeStructs.
      sharding: the same tree of shardings.
    """
    return jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=where
        ),
        state,
        sharding,
    )


@contextlib.contextmanager
def _checkpointer() -> Iterator[ocp.Checkpointer]:
    """Yields an orbax checkpointer that raises errors and does not log them too."""
    before = logging.get_verbosity()
    logging.set_verbosity(logging.FATAL)
    try:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            yield checkpointer
    finally:
        logging.set_verbosity(before)


def _reason(error: Exception) -> str:
    """Shortens an error to its cause, the last part of tensorstore's long messages."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if isinstance(error, OSError):
        return error.strerror or lines[0]
    return lines[0].rsplit(": ", 1)[-1].partition(" [")[0]


def _paths(folder: pathlib.Path, step: int) -> tuple[pathlib.Path, pathlib.Path]:
    return folder / f"{step:08d}", folder / f"{step:08d}.json"


def _all_steps(folder: pathlib.Path) -> list[int]:
    """Returns every step with a checkpoint or a manifest, ascending."""
    if not folder.is_dir():
        return []
    matches = (_STEP.fullmatch(path.name) for path in folder.iterdir())
    return sorted({int(match[1]) for match in matches if match})


def _steps(folder: pathlib.Path) -> list[int]:
    """Returns the steps that have a manifest, ascending."""
    return [step for step in _all_steps(folder) if _paths(folder, step)[1].is_file()]


def _digests(path: pathlib.Path) -> dict[str, str]:
    written = (file for file in sorted(path.rglob("*")) if file.is_file())
    return {str(file.relative_to(path)): files.digest(file) for file in written}


def _damage(path: pathlib.Path, manifest: pathlib.Path) -> str:
    """Returns the damage of a checkpoint in words; empty if there is none."""
    try:
        expected = json.loads(manifest.read_text())
    except (OSError, ValueError):
        return "its manifest cannot be read"
    for name, digest in expected.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if files.digest(file) != digest:
            return f"{name} differs from what was written"
    return ""
