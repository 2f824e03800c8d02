"""Scenario II: a translator whose halves never show each other their text (Fig. 5, 7).

    python -m experiments.train_abnet \\
        --flagfile=experiments/flags/abnet_quickstart.flags

starts the source and the target cluster here. On real clusters each runs its own part
of the same flagfile, with its own side of the text (scripts/split_parallel.py):

    ... --cluster=target --listen=0.0.0.0:7070 --side_dir=sides/target
    ... --cluster=source --peer=t.example:7070 --side_dir=sides/source

`--cluster=whole` is the same computation in one process: the reference. The loops are
in `abnet/source`, `abnet/target` and `abnet/whole`; what crosses is in
`abnet/channels`.
"""

import contextlib
import dataclasses
import functools
import time
from typing import Any

from experiments import cluster_process, configuration, shared_flags
from experiments.abnet import (
    config,
    data,
    models,
    report,
    source,
    target,
    target_model,
    whole,
)
from nebula_jax.runtime import connect
from nebula_jax.runtime.life import launcher
from nebula_jax.runtime.ranks import devices
from nebula_jax.runtime.records import checkpoints, run_folder, traces


def main() -> int:
    """Runs the part that --cluster names."""
    run = config.from_flags()
    cluster, layout = run.local.cluster, run.local.layout()
    connect.check_role(run.local.connection(), cluster, "target", "source")
    config.check(run)
    devices.simulate(layout, run.local.num_processes or 1)
    if cluster in ("all", "whole"):
        with run_folder.lock(run.local.workdir):
            return _run_here(run)
    train = source.train if cluster == "source" else target.train
    folder = run_folder.of_cluster(run.local.workdir, cluster)
    settings = configuration.settings(run.agreed)
    return cluster_process.run(
        run, settings, folder, train, cluster, train_writes_flags=True
    )


def _run_here(run: config.Run) -> int:
    """Gives each side its text, prepares the models, runs the clusters, reports."""
    begin = time.monotonic()
    workdir, is_whole = run.local.workdir, run.local.cluster == "whole"
    names = ("whole",) if is_whole else config.CLUSTERS
    settings = configuration.settings(run.agreed)
    for name in names:
        checkpoints.check_same_run(workdir, name, settings)
    with contextlib.ExitStack() as stack:
        if not is_whole:
            # Ports and certificates first: text and models take long.
            launch = stack.enter_context(
                launcher.prepared(
                    workdir,
                    config.CLUSTERS,
                    run.local.connection(),
                    run.local.restart,
                    run.local.processes_per_cluster,
                )
            )
        folders = data.split(run)
        # What is wrong with it shows before anything starts.
        encoder = {"source_model": models.load_source(run).digest}
        checkpoints.check_same_run(workdir, names[-1], settings, encoder)
        target_model.prepare(run, folders[1])
        configuration.write_run_flags(workdir, run)
        if is_whole:
            status = whole.train(run, folders)
        else:
            arguments = functools.partial(_arguments, run, folders)
            status = launch("experiments.train_abnet", arguments)
    if status == 0:
        reported = {name: run_folder.of_cluster(workdir, name) for name in names}
        traces.gather(workdir, reported.values(), run.local.traced)
        report.report(
            workdir,
            reported,
            {**dataclasses.asdict(run.agreed), **_reported(run.local)},
            time.monotonic() - begin,
        )
    return status


def _arguments(
    run: config.Run, folders: whole.Folders, cluster: str, reach: connect.Settings
) -> list[str]:
    """Returns the flags of one cluster's process, whose pairs have been chosen."""
    local = dataclasses.replace(
        run.local.reaching(cluster, reach),
        side_dir=str(folders[("source", "target").index(cluster)]),
        corpora=(),
        max_pairs=None,
        max_words=None,
        held_out_pairs=0,
    )
    return configuration.arguments(config.Run(run.agreed, local))


def _reported(local: config.Local) -> dict[str, Any]:
    """Returns what the summary has of this process's own settings."""
    names = (
        "source_model",
        "target_model",
        "data_dir",
        "corpora",
        "max_pairs",
        "wan",
        "max_in_flight",
        "mlm_head_steps",
        "held_out_pairs",
    )
    return {name: getattr(local, name) for name in names}


if __name__ == "__main__":
    shared_flags.run(main, config.DEFAULTS, names=config.FLAGS)
