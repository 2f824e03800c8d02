"""BERT in every cluster: masked language modeling, with local steps over a slow line.

    python -m experiments.pretrain_bert \\
        --flagfile=experiments/flags/bert_quickstart.flags

starts two clusters here, each of which trains a copy on its own rows of real text; they
meet every --inner_steps. On real clusters each runs its own part of the same flagfile:

    ... --cluster=0 --listen=0.0.0.0:7070 --vocabulary=shared.model
    ... --cluster=1 --peer=c0.example:7070 --vocabulary=shared.model

With three clusters or more, --peer has the addresses of all that come before, or with
--hub that of the hub. One cluster (--clusters=1 --sync=allreduce) may have many
processes, which add up their gradients at every step. `--cluster=whole` is the same
computation in one process: the reference. The loop is in `bert/cluster`; which of all
this to choose is in `bert/README.md`.
"""

import contextlib
import dataclasses
import functools
import time
from typing import Any

from absl import flags

from experiments import cluster_process, configuration, shared_flags
from experiments.bert import cluster as cluster_loop
from experiments.bert import config, data, report, whole
from experiments.pretraining import vocabulary as vocabularies
from nebula_jax.runtime import connect
from nebula_jax.runtime.connect import all_clusters
from nebula_jax.runtime.life import launcher, process
from nebula_jax.runtime.ranks import devices
from nebula_jax.runtime.records import checkpoints, run_folder, traces

for _name in config.FLAGS:
    flags.declare_key_flag(_name)


def main() -> int:
    """Runs the part that --cluster names."""
    run = config.from_flags()
    agreed, cluster = run.agreed, run.local.cluster
    config.check(run)
    names = config.names(agreed)
    if cluster in ("all", "whole"):
        devices.simulate(run.local.layout(), run.local.num_processes or 1)
        with run_folder.lock(run.local.workdir):
            return _run_here(run)
    index = config.index_of(agreed, cluster)
    all_clusters.check_place(run.local.connection(), cluster, names, agreed.hub)
    devices.simulate(run.local.layout(), run.local.num_processes or 1)
    run = data.checked(run, only=index)
    settings = config.settings(run, vocabularies.given(run.local))
    folder = run_folder.of_cluster(run.local.workdir, cluster)
    return cluster_process.run(run, settings, folder, cluster_loop.train, cluster)


def _run_here(run: config.Run) -> int:
    """Prepares text and vocabulary, runs every cluster here, and reports."""
    begin = time.monotonic()
    run = data.checked(run)
    workdir, names = run.local.workdir, config.names(run.agreed)
    is_whole = run.local.cluster == "whole"
    with contextlib.ExitStack() as stack:
        if not is_whole:
            dials = {
                name: all_clusters.dialed(name, names, run.agreed.hub) for name in names
            }
            launch = stack.enter_context(
                launcher.prepared(
                    *(workdir, names, run.local.connection(), run.local.restart),
                    *(run.local.processes_per_cluster, dials),
                )
            )
        run = run.with_local(vocabulary=str(data.shared_vocabulary(run)))
        vocabulary = vocabularies.given(run.local)
        settings = config.settings(run, vocabulary)
        for name in names:
            checkpoints.check_same_run(workdir, name, settings)
        configuration.write_run_flags(workdir, run)
        if not run.local.data:  # who serves it has prepared it
            with process.timed("preparing the text"):
                for index in range(len(names)):
                    data.text_of(run, index, vocabulary)
        if is_whole:
            status = whole.train(run)
        else:
            arguments = functools.partial(_arguments, run)
            status = launch("experiments.pretrain_bert", arguments)
    if status == 0:
        reported = ["whole"] if is_whole else names
        clusters = {name: run_folder.of_cluster(workdir, name) for name in reported}
        traces.gather(workdir, clusters.values(), run.local.traced)
        values = {**dataclasses.asdict(run.agreed), **_reported(run.local)}
        seconds = time.monotonic() - begin
        report.report(workdir, clusters, values, vocabulary.size, seconds)
    return status


def _arguments(run: config.Run, cluster: str, reach: connect.Settings) -> list[str]:
    """Returns the flags of one cluster's process."""
    local = run.local.reaching(cluster, reach)
    return configuration.arguments(configuration.Run(run.agreed, local))


def _reported(local: config.Local) -> dict[str, Any]:
    """Returns what the summary has of this process's own settings."""
    names = ("hot_start", "data_dir", "wan", "devices_per_cluster", "emulate_compute")
    return {name: getattr(local, name) for name in names}


if __name__ == "__main__":
    shared_flags.run(main, config.DEFAULTS)
