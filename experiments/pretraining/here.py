"""A pre-training run on this machine: --cluster=all, or --cluster=whole."""

import contextlib
import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from experiments import configuration
from experiments.pretraining import vocabulary as vocabularies
from nebula_jax.runtime import connect
from nebula_jax.runtime.life import launcher, process, restarts
from nebula_jax.runtime.records import checkpoints, run_folder, traces
from nebula_jax.runtime.records import report as run_report
from nebula_jax.training import metrics


class Experiment(NamedTuple):
    """The parts of an experiment that differ between M3 and BERT."""

    module: str
    """As in `python -m`."""
    settings: Callable[..., dict[str, Any]]
    """(run, vocabulary) -> what all clusters must share."""
    shared_vocabulary: Callable[..., Any]
    """run -> the vocabulary's path; made of the run's text if none is given."""
    text_of: Callable[..., Any]
    """(run, index, vocabulary) -> the text of one reader, prepared."""
    train_whole: Callable[..., int]
    """run -> the exit status of all parts trained in this process."""
    figures: Callable[..., dict[str, Any]]
    """(summaries, records, flags, V) -> what a summary has beside `_report`'s entries;
    the first two by cluster."""
    plot: Callable[..., None]
    """(summaries, records, path of the PNG): draws the curves of a run."""
    markdown: Callable[..., str]
    """summary -> Markdown."""
    reported: Sequence[str]
    """Settings of this process that belong into the summary."""


def run_here(
    experiment: Experiment,
    run: configuration.Run,
    names: Sequence[str],
    readers: int,
    dials: Mapping[str, Sequence[str]] | None = None,
) -> int:
    """Prepares text and vocabulary, runs every cluster here, and reports.

    Args:
      experiment: what differs between experiments.
      run: of this process, checked against its text.
      names: of the clusters, the first to listen first.
      readers: how many of the clusters read text.
      dials: see `launcher.prepared`.

    Returns:
      The exit status.
    """
    begin, workdir = time.monotonic(), run.local.workdir
    is_whole = run.local.cluster == "whole"
    with contextlib.ExitStack() as stack:
        if not is_whole:  # a port or certificate that is missing shows before the text
            launch = stack.enter_context(
                launcher.prepared(
                    workdir,
                    names,
                    run.local.connection(),
                    restarts=run.local.restart,
                    processes_per_cluster=run.local.processes_per_cluster,
                    dials=dials,
                )
            )
        run = run.with_local(vocabulary=str(experiment.shared_vocabulary(run)))
        vocabulary = vocabularies.given(run.local)
        settings = experiment.settings(run, vocabulary)
        for name in names:
            checkpoints.check_same_run(workdir, name, settings)
        configuration.write_run_flags(workdir, run)
        if not run.local.data:  # the organization that serves text has prepared it
            with process.timed("preparing the text"):
                for index in range(readers):
                    experiment.text_of(run, index, vocabulary)
        if is_whole:
            status = experiment.train_whole(run)
        else:
            status = launch(experiment.module, functools.partial(_arguments, run))
    if status == 0:
        reported = ["whole"] if is_whole else names
        clusters = {name: run_folder.of_cluster(workdir, name) for name in reported}
        traces.gather(workdir, clusters.values(), run.local.traced)
        own = {name: getattr(run.local, name) for name in experiment.reported}
        values = dataclasses.asdict(run.agreed) | own
        seconds = time.monotonic() - begin
        _report(experiment, workdir, clusters, values, vocabulary.size, seconds)
    return status


def _report(
    experiment: Experiment,
    folder: pathlib.Path,
    clusters: Mapping[str, pathlib.Path],
    settings: Mapping[str, Any],
    vocab_size: int,
    seconds: float,
) -> None:
    """Writes summary.json and plot unless they are up to date; prints the Markdown."""
    path, picture = folder / "summary.json", folder / "losses.png"
    if run_report.is_stale(path, clusters.values()):
        found = {name: run_report.read_summary(each) for name, each in clusters.items()}
        records = {name: metrics.read(each) for name, each in clusters.items()}
        run_report.draw(functools.partial(experiment.plot, found, records), picture)
        summary = {
            **run_report.provenance(run_report.wall_seconds(seconds, found.values())),
            "vocab_size": vocab_size,
            "flags": dict(settings),
            "clusters": [each for each in found.values() if each],
            "restarts": restarts.read(folder, clusters.values()),
            "losses": {
                name: run_report.first_and_last(each) for name, each in records.items()
            },
            **experiment.figures(found, records, settings, vocab_size),
        }
        run_report.write(path, summary)
    run_report.show(experiment.markdown(run_report.read_summary(folder)))
    run_report.print_paths(path, picture)


def _arguments(
    run: configuration.Run, cluster: str, reach: connect.Settings
) -> list[str]:
    """Returns the flags of one cluster's process."""
    local = run.local.reaching(cluster, reach)
    return configuration.arguments(configuration.Run(run.agreed, local))
