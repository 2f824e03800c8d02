"""One process of one cluster: its root alone has the cluster's folder."""

import contextlib
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from experiments import configuration
from nebula_jax.communication import ranks
from nebula_jax.runtime import checkpoints, cluster, run_folder

RunT = TypeVar("RunT", bound=configuration.Run)


def run(
    run: RunT,
    settings: Mapping[str, Any],
    folder: pathlib.Path,
    train: Callable[[RunT], int],
    name: str = "",
) -> int:
    """Runs this process's part of a cluster; returns the exit status.

    Args:
      run: of this process.
      settings: what must be equal in all clusters.
      folder: of the cluster; locked by its root.
      train: trains to the end; returns the exit status.
      name: of the cluster, whose root then also writes `run.flags`; if empty, `train`
        checks and writes.

    Raises:
      errors.NebulaError: if another process works in the folder, if it holds another
        run, or as `cluster.run`.
    """

    def part() -> int:
        with contextlib.ExitStack() as held:
            if ranks.is_root():
                held.enter_context(run_folder.lock(folder))
                if name:
                    checkpoints.check_same_run(run.local.workdir, name, settings)
                    configuration.write_run_flags(folder, run)
            return train(run)

    described = configuration.described(run, settings)
    return cluster.run(run.local.processes(), described, part)
