"""Checkpoints of one cluster: arrays by orbax, in the files of `checkpoint_files`."""

import asyncio
import contextlib
import pathlib
import shutil
import threading
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging

from nebula_jax.training import checkpoint_files, partition

CheckpointError = checkpoint_files.CheckpointError
STATE = "state"  # orbax's folder in a checkpoint


def save(
    saved: checkpoint_files.Folder,
    step: int,
    state: Any,
    about: Mapping[str, Any],
    keep: int,
) -> None:
    """Writes the checkpoint after `step` optimization steps; keeps the newest `keep`.

    JSON values `about` it are what `restore` returns: data position, settings.
    CheckpointError if it cannot be written, such as on a full disk; earlier ones stay.
    """

    def write_arrays(folder: pathlib.Path) -> None:
        _check_room(folder, state)
        with _checkpointer() as checkpointer:
            path = (folder / STATE).absolute()
            checkpointer.save(path, args=ocp.args.StandardSave(state))

    saved.save(step, about, write_arrays, keep)


def _check_room(folder: pathlib.Path, state: Any) -> None:
    """Raises OSError if the disk cannot hold the state."""
    # Of a write that fails half-way tensorstore's threads would print tracebacks.
    needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(
            f"No space left on device: {needed / 1e6:.1f} MB are needed,"
            f" {free / 1e6:.1f} MB are free"
        )


def restore(folder: pathlib.Path, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
    """Reads the state and metadata of a step of `checkpoint_files.verified_steps`.

    `like` is a pytree of ShapeDtypeStructs with shardings, see `abstract`. Raises
    CheckpointError if the checkpoint has another structure.
    """
    return read(folder, step, like), checkpoint_files.about(folder, step)


def read(folder: pathlib.Path, step: int, like: Any = None) -> Any:
    """Reads the state of a verified checkpoint; CheckpointError if it is another's.

    Without `like`, as nested dicts of arrays on the host, for who needs parts of it.
    """
    path = folder / f"{step:08d}" / STATE
    try:
        with _checkpointer() as checkpointer:
            arguments = ocp.args.StandardRestore(like)
            return checkpointer.restore(path.absolute(), args=arguments)
    except (ValueError, KeyError, TypeError, OSError) as error:
        words = checkpoint_files.reason(error)
        raise CheckpointError(f"cannot use {path.parent}: {words}") from None


def put_back(params: Any, trained: Any, is_trained: partition.IsTrained) -> Any:
    """Returns parameters with a run's trained ones; CheckpointError at other shapes."""
    wanted, frozen = partition.split(params, is_trained)
    shapes = [jax.tree.map(lambda leaf: leaf.shape, each) for each in (wanted, trained)]
    if shapes[0] != shapes[1]:
        raise CheckpointError(
            "the checkpoint's model has another shape than the run's flags give it"
        )
    return partition.merge(trained, frozen)


def abstract(state: Any, sharding: Any) -> Any:
    """Makes `like` for `restore` of arrays, or specs, and a like tree of shardings."""
    return jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=where
        ),
        state,
        sharding,
    )


def on_host(state: Any) -> Any:
    """Makes `like` for `restore`: NumPy arrays of the shapes and dtypes of `state`."""
    return jax.tree.map(
        lambda leaf: np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape), state
    )


class _QuietLoop(asyncio.SelectorEventLoop):
    """An event loop that prints nothing when many writes fail at once."""

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Drops an error that nobody waits for: the first one was raised."""

    def call_soon_threadsafe(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Calls back, unless nobody waits any more."""
        if self.is_closed():  # by orbax; tensorstore's threads still bring results
            return None
        return super().call_soon_threadsafe(*args, **kwargs)


class _QuietLoops(asyncio.DefaultEventLoopPolicy):
    """The policy of orbax's event loops, of which it makes one for each operation."""

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        """Returns a loop."""
        return _QuietLoop()


_TURN = threading.Lock()
"""Held while orbax works: event loops and log are those of the whole process, of which
several clusters may be threads."""


@contextlib.contextmanager
def _checkpointer() -> Iterator[ocp.Checkpointer]:
    """Yields an orbax checkpointer that raises errors and does not print them too."""
    with _TURN:
        before = logging.get_verbosity(), asyncio.get_event_loop_policy()
        logging.set_verbosity(logging.FATAL)
        asyncio.set_event_loop_policy(_QuietLoops())
        try:
            # Of several processes the root alone calls this; orbax would wait for all.
            alone = ocp.options.MultiprocessingOptions(
                primary_host=jax.process_index(),
                active_processes={jax.process_index()},
                barrier_sync_key_prefix="root",
            )
            handler = ocp.StandardCheckpointHandler(multiprocessing_options=alone)
            made = ocp.Checkpointer(handler, multiprocessing_options=alone)
            with made as checkpointer:
                yield checkpointer
        except Exception:
            # Writes that never began are reported when they are freed, perhaps at exit.
            never = "coroutine .* was never awaited"
            warnings.filterwarnings("ignore", never, RuntimeWarning)
            raise
        finally:
            logging.set_verbosity(before[0])
            asyncio.set_event_loop_policy(before[1])
