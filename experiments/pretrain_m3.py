"""Scenario I: pre-train a discriminator from remote generators (Fig. 4 and 6).

    python -m experiments.pretrain_m3 --flagfile=experiments/flags/m3_quickstart.flags

starts two generators and a discriminator here, on real text in 15 languages. On real
clusters each runs its own part of the same flagfile:

    ... --cluster=discriminator --listen=0.0.0.0:7070 --vocabulary=shared.model
    ... --cluster=generator:0 --peer=d.example:7070 --vocabulary=shared.model

with the languages of each generator written out (--generators="en de|hi ur").
`--cluster=whole` is the same computation uncut, in one process: the reference.

    python -m experiments.pretrain_m3 --eval_only --run=RUN --data_dir=FOLDER

evaluates what all clusters of a run have saved, on any folder's held-out text. The
loops are in `m3/generator`, `m3/discriminator` and `m3/whole`.
"""

import functools

from experiments import cluster_process, configuration, here, shared_flags
from experiments.m3 import (
    config,
    data,
    discriminator,
    evaluate,
    generator,
    report,
    whole,
)
from experiments.pretraining import prepare
from experiments.pretraining import vocabulary as shared_vocabulary
from nebula_jax import errors
from nebula_jax.commands import command_line, fields
from nebula_jax.runtime.connect import all_clusters
from nebula_jax.runtime.ranks import devices

EXPERIMENT = here.Experiment(
    module="experiments.pretrain_m3",
    prepare=functools.partial(
        prepare.prepare,
        config=config,
        data=data,
        train_whole=whole.train,
        without_text=1,  # the discriminator
    ),
    report=report,
    reported=(
        "hot_start",
        "discriminator_start",
        "data_dir",
        "wan",
        "devices_per_cluster",
        "emulate_compute",
    ),
)


def main() -> int:
    """Runs the part that --cluster names, or evaluates a run."""
    command = fields.read(shared_flags.Command)
    if configuration.is_evaluation(command, "pretrain_m3"):
        run = config.from_flags()
        devices.simulate(run.local.layout())
        return evaluate.evaluate(run)
    configuration.take_model("pretrain_m3", config.FLAGS)
    run = config.from_flags()
    cluster = run.local.cluster
    kind, _, number = cluster.partition(":")
    index = command_line.whole_number(number) if kind == "generator" else None
    if index is None and cluster not in ("all", "whole", "discriminator"):
        raise errors.SettingsError(
            f"--cluster={cluster}: expected all, whole, discriminator or generator:K"
        )
    # How many generators there are may be known only once the text is read.
    names = ["discriminator", "generator:0" if index is None else cluster]
    all_clusters.check_place(run.local.connection(), cluster, names)
    config.check(run)
    devices.simulate(run.local.layout(), run.local.num_processes or 1)
    if cluster in ("all", "whole"):
        run = data.checked(run)
        return here.run_here(EXPERIMENT, run, config.names(run.agreed))
    if index is None:
        run, train = data.without_text(run), discriminator.train
    else:
        run = data.checked(run, only=index)
        train = functools.partial(generator.train, index=index)
    settings = config.settings(run, shared_vocabulary.given(run.local))
    return cluster_process.run(run, settings, train)


if __name__ == "__main__":
    shared_flags.run(main, config.DEFAULTS, names=config.FLAGS)
