"""A run on this machine: --cluster=all, or --cluster=whole."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from experiments import configuration
from nebula_jax.face import report as face_report
from nebula_jax.runtime import connect
from nebula_jax.runtime.life import launcher, restarts
from nebula_jax.runtime.records import report as run_report
from nebula_jax.runtime.records import run_folder, traces


class Prepared(NamedTuple):
    """A run whose text and models are there."""

    run: configuration.Run
    train_whole: Callable[[], int]  # trains all parts here; returns the exit status
    arguments: Callable[[str, connect.Settings], list[str]]
    """(cluster, how to connect) -> the flags of its process."""
    figures: Mapping[str, Any] = {}  # what a summary has of it


class Experiment(NamedTuple):
    """The parts of an experiment that differ from those of others."""

    module: str  # as in `python -m`
    prepare: Callable[[Any, Sequence[str]], Prepared]
    """Prepares (run, names of its clusters), and checks that no other run is there."""
    report: Any  # its module of `curves`, `figures` and `markdown`; see `face.report`
    reported: Sequence[str]  # settings of this process that belong into the summary


def run_here(
    experiment: Experiment,
    run: configuration.Run,
    names: Sequence[str],
    dials: Mapping[str, Sequence[str]] | None = None,
) -> int:
    """Prepares a run, runs every cluster here, and reports; returns the exit status.

    Of the clusters' names the first listens first; for `dials` see `launcher.prepared`.
    """
    begin, local, workdir = time.monotonic(), run.local, run.local.workdir
    is_whole = local.cluster == "whole"
    with contextlib.ExitStack() as stack:
        stack.enter_context(run_folder.lock(workdir))
        if not is_whole:  # a port or certificate that is missing shows before the text
            launch = stack.enter_context(
                launcher.prepared(
                    workdir,
                    names,
                    local.connection(),
                    restarts=local.restart,
                    processes_per_cluster=local.processes_per_cluster,
                    dials=dials,
                )
            )
        prepared = experiment.prepare(run, names)
        configuration.write_run_flags(workdir, prepared.run)
        if is_whole:
            status = prepared.train_whole()
        else:
            status = launch(["-m", experiment.module], prepared.arguments)
        if status == 0:
            reported = ["whole"] if is_whole else names
            folders = {name: run_folder.of_cluster(workdir, name) for name in reported}
            traces.gather(workdir, folders.values(), local.traced)
            own = {name: getattr(local, name) for name in experiment.reported}
            flags = dataclasses.asdict(prepared.run.agreed) | own
            seconds = time.monotonic() - begin
            face_report.report(
                workdir,
                folders,
                {**prepared.figures, "flags": flags},
                seconds,
                curves=experiment.report.curves,
                figures=experiment.report.figures,
                markdown=experiment.report.markdown,
            )
    return status


def arguments(
    run: configuration.Run, cluster: str, reach: connect.Settings
) -> list[str]:
    """Returns the flags of one cluster's process."""
    local = run.local.reaching(cluster, reach)
    return configuration.arguments(configuration.Run(run.agreed, local))


def markdown(summary: Mapping[str, Any], *figures: str) -> str:
    """Renders a run's summary: what all runs have, and an experiment's own figures."""
    pieces = summary.get("vocab_size")
    vocabulary = f", vocabulary of {pieces:,} pieces" if pieces else ""
    return run_report.join(
        run_report.heading(summary, f"seed {summary['flags']['seed']}", vocabulary),
        run_report.clusters(summary),
        run_report.missing(summary),
        restarts.markdown(summary),
        traces.markdown(summary["clusters"]),
        run_report.outages(summary["clusters"]),
        *figures,
    )
