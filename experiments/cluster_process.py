"""One process of one cluster: its root alone has the cluster's folder."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from experiments import configuration
from nebula_jax import files, installed
from nebula_jax.commands import command_line
from nebula_jax.communication import ranks
from nebula_jax.runtime import connect
from nebula_jax.runtime.ranks import cluster
from nebula_jax.runtime.records import report, run_folder

RunT = TypeVar("RunT", bound=configuration.Run)


def run(
    run: RunT,
    settings: Mapping[str, Any],
    train: Callable[[RunT], int],
) -> int:
    """Runs this process's part of a cluster, by `train`; returns the exit status.

    The settings must be equal in all clusters. Raises errors.NebulaError if another
    process works in the folder, or as `cluster.run`.
    """
    described = _described(run, settings)
    folder, has_others = run.local.workdir, isinstance(run.local, configuration.Local)
    if has_others:
        folder = run_folder.of_cluster(folder, run.local.cluster)

    def part() -> int:
        if not ranks.is_root():
            return train(run)
        with run_folder.lock(folder), contextlib.ExitStack() as held:
            ends: dict[str, int] = {}
            if has_others:
                ends = held.enter_context(_recorded(run, described))
            ends["status"] = train(run)
            return ends["status"]

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
def _recorded(run: Any, described: Mapping[str, Any]) -> Iterator[dict[str, int]]:
    """Records in a federation's audit log that a cluster begins, and how it ends.

    Yields a dict for the exit `status`: if it is not 0, or not there, the cluster has
    stopped before its last step.
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
    ends: dict[str, int] = {}
    try:
        yield ends
    finally:
        recorder.record("job", event="stopped" if ends.get("status", 1) else "ended")
        recorder.close()
