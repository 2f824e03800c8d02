"""One process of one cluster: its root alone has the cluster's folder."""

import contextlib
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from experiments import configuration
from nebula_jax import files, installed
from nebula_jax.commands import command_line
from nebula_jax.communication import ranks
from nebula_jax.runtime import connect
from nebula_jax.runtime.ranks import cluster
from nebula_jax.runtime.records import checkpoints, report, run_folder

RunT = TypeVar("RunT", bound=configuration.Run)


def run(
    run: RunT,
    settings: Mapping[str, Any],
    folder: pathlib.Path,
    train: Callable[[RunT], int],
    name: str = "",
    train_writes_flags: bool = False,
) -> int:
    """Runs this process's part of a cluster; returns the exit status.

    Args:
      settings: what must be equal in all clusters.
      folder: of the cluster; locked by its root.
      train: trains to the end; returns the exit status.
      name: of the cluster, whose root then also writes `run.flags`; if empty, `train`
        checks and writes.
      train_writes_flags: leaves `run.flags` to `train`, which compares more than
        settings before: flags of a run that is refused are not to be the folder's.

    Raises:
      errors.NebulaError: if another process works in the folder, if it holds another
        run, or as `cluster.run`.
    """

    described = _described(run, settings)

    def part() -> int:
        ended: Callable[[], None] = _nothing
        with contextlib.ExitStack() as held:
            if ranks.is_root():
                held.enter_context(run_folder.lock(folder))
                if name:
                    checkpoints.check_same_run(run.local.workdir, name, settings)
                    if not train_writes_flags:
                        configuration.write_run_flags(folder, run)
                    ended = held.enter_context(_recorded(run, described))
            status = train(run)
            if status == 0:
                ended()
            return status

    # Of several processes each reports its own errors, before `main` has them.
    processes = run.local.processes()
    return cluster.run(processes, described, lambda: command_line.with_flags(part))


def _described(run: configuration.Run, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what must be equal in all processes of a cluster."""
    # In the order of a checkout, where a wheel's bundled folders are elsewhere.
    experiments = sorted((installed.FOLDER / "experiments").rglob("*.py"))
    library = sorted(installed.PACKAGE.rglob("*.py"))
    bundled = installed.PACKAGE / "bundled"
    code = experiments + [each for each in library if bundled not in each.parents]
    return {
        **settings,
        **{f"--{name}": value for name, value in vars(run.local.layout()).items()},
        "code": files.digest_of([files.digest(path) for path in code]),
    }


@contextlib.contextmanager
def _recorded(run: Any, described: Mapping[str, Any]) -> Iterator[Callable[[], None]]:
    """Records in a federation's audit log that a cluster begins, and how it ends.

    Yields:
      A function to be called if it has taken its last step; else it has stopped.
    """
    recorder = connect.recorder(run.local.connection(), run.local.cluster)
    recorder.record(
        "job",
        event="began",
        commit=report.commit(),
        code=described["code"],
        settings=files.digest_of(sorted(described.items())),
        data=getattr(run.local, "data", "") or "its own",
    )
    event = "stopped"

    def ended() -> None:
        nonlocal event
        event = "ended"

    try:
        yield ended
    finally:
        recorder.record("job", event=event)
        recorder.close()


def _nothing() -> None:
    """Records nothing: this process is not its cluster's root."""
