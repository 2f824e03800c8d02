"""BERT in every cluster: masked language modeling, with local steps over a slow line.

    python -m experiments.pretrain_bert \\
        --flagfile=experiments/flags/bert_quickstart.flags

starts two clusters here, each of which trains a replica on its own rows of real text;
they exchange every --inner_steps. On real clusters each runs its part of the flagfile:

    ... --cluster=0 --listen=0.0.0.0:7070 --vocabulary=shared.model
    ... --cluster=1 --peer=c0.example:7070 --vocabulary=shared.model

With three clusters or more, --peer has the addresses of all that come before, or with
--hub that of the hub. One cluster (--clusters=1 --sync=allreduce) may have many
processes, which add up their gradients at every step. `--cluster=whole` is the same
computation in one process: the reference. The loop is in `bert/cluster`; which of all
this to choose is in `bert/README.md`.
"""

import functools

from experiments import cluster_process, here, shared_flags
from experiments.bert import cluster as cluster_loop
from experiments.bert import config, data, report, whole
from experiments.pretraining import prepare
from experiments.pretraining import vocabulary as vocabularies
from nebula_jax.runtime.connect import all_clusters
from nebula_jax.runtime.ranks import devices

EXPERIMENT = here.Experiment(
    module="experiments.pretrain_bert",
    prepare=functools.partial(
        prepare.prepare,
        config=config,
        data=data,
        train_whole=whole.train,
    ),
    report=report,
    reported=("hot_start", "data_dir", "wan", "devices_per_cluster", "emulate_compute"),
)


def main() -> int:
    """Runs the part that --cluster names."""
    run = config.from_flags()
    agreed, cluster = run.agreed, run.local.cluster
    config.check(run)
    connection, names = run.local.connection(), config.names(agreed)
    all_clusters.check_place(connection, cluster, names, agreed.hub)
    devices.simulate(run.local.layout(), run.local.num_processes or 1)
    if cluster in ("all", "whole"):
        dials = {name: all_clusters.dialed(name, names, agreed.hub) for name in names}
        return here.run_here(EXPERIMENT, data.checked(run), names, dials)
    run = data.checked(run, only=config.index_of(agreed, cluster))
    settings = config.settings(run, vocabularies.given(run.local))
    return cluster_process.run(run, settings, cluster_loop.train)


if __name__ == "__main__":
    shared_flags.run(main, config.DEFAULTS, names=config.FLAGS)
