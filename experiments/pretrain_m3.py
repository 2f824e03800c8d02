"""Scenario I: pre-train a discriminator from remote generators (Fig. 4 and 6).

    python -m experiments.pretrain_m3 --flagfile=experiments/flags/m3_quickstart.flags

starts two generators and a discriminator here, on real text in 15 languages. On real
clusters each runs its own part of the same flagfile:

    ... --cluster=discriminator --listen=0.0.0.0:7070 --vocabulary=shared.model
    ... --cluster=generator:0 --peer=d.example:7070 --vocabulary=shared.model

with the languages of each generator written out (--generators="en de|hi ur").
`--cluster=whole` is the same computation uncut, in one process: the reference. The
loops are in `m3/generator`, `m3/discriminator` and `m3/whole`.
"""

import contextlib
import dataclasses
import functools
import time
from typing import Any

from absl import flags

from experiments import cluster_process, command_line, configuration, shared_flags
from experiments.m3 import config, data, discriminator, generator, report, whole
from experiments.pretraining import vocabulary as shared_vocabulary
from nebula_jax import errors
from nebula_jax.runtime import connect
from nebula_jax.runtime.life import launcher, process
from nebula_jax.runtime.ranks import devices
from nebula_jax.runtime.records import checkpoints, run_folder, traces

for _name in config.FLAGS:
    flags.declare_key_flag(_name)


def main() -> int:
    """Runs the part that --cluster names."""
    run = config.from_flags()
    cluster = run.local.cluster
    connect.check_role(run.local.connection(), cluster, "discriminator", "generator")
    config.check(run)
    devices.simulate(run.local.layout(), run.local.num_processes or 1)
    match cluster.split(":"):
        case ["all" | "whole"]:
            with run_folder.lock(run.local.workdir):
                return _run_here(run)
        case ["discriminator"]:
            run = data.without_text(run)
            train = discriminator.train
        case ["generator", number] if (
            index := command_line.whole_number(number)
        ) is not None:
            run = data.checked(run, only=index)
            train = functools.partial(generator.train, index=index)
        case _:
            raise errors.SettingsError(
                f"--cluster={cluster}: expected all, whole, discriminator or"
                " generator:K"
            )
    settings = config.settings(run, shared_vocabulary.given(run.local))
    folder = run_folder.of_cluster(run.local.workdir, cluster)
    return cluster_process.run(run, settings, folder, train, cluster)


def _run_here(run: config.Run) -> int:
    """Prepares text and vocabulary, runs every cluster here, and reports."""
    begin = time.monotonic()
    run = data.checked(run)
    workdir, generators = run.local.workdir, len(run.agreed.groups())
    is_whole = run.local.cluster == "whole"
    names = ["discriminator", *(f"generator:{k}" for k in range(generators))]
    with contextlib.ExitStack() as stack:
        if not is_whole:
            launch = stack.enter_context(
                launcher.prepared(
                    *(workdir, names, run.local.connection(), run.local.restart),
                    run.local.processes_per_cluster,
                )
            )
        run = run.with_local(vocabulary=str(data.shared_vocabulary(run)))
        vocabulary = shared_vocabulary.given(run.local)
        settings = config.settings(run, vocabulary)
        for name in names:
            checkpoints.check_same_run(workdir, name, settings)
        configuration.write_run_flags(workdir, run)
        if not run.local.data:  # who serves it has prepared it
            with process.timed("preparing the text"):
                for index in range(generators):
                    data.text_of(run, index, vocabulary)
        if is_whole:
            status = whole.train(run)
        else:
            status = launch(
                "experiments.pretrain_m3", functools.partial(_arguments, run)
            )
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
    return configuration.arguments(
        config.Run(run.agreed, run.local.reaching(cluster, reach))
    )


def _reported(local: config.Local) -> dict[str, Any]:
    """Returns what the summary has of this process's own settings."""
    names = (
        *("hot_start", "discriminator_start", "data_dir", "wan"),
        *("devices_per_cluster", "emulate_compute"),
    )
    return {name: getattr(local, name) for name in names}


if __name__ == "__main__":
    shared_flags.run(main, config.DEFAULTS)
