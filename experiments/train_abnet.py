"""Scenario II: a translator whose halves never show each other their text (Fig. 5, 7).

    python -m experiments.train_abnet \\
        --flagfile=experiments/flags/abnet_quickstart.flags

starts the source and the target cluster here. On real clusters each runs its own part
of the same flagfile, with its own side of the text (scripts/split_parallel.py):

    ... --cluster=target --listen=0.0.0.0:7070 --side_dir=sides/target
    ... --cluster=source --peer=t.example:7070 --side_dir=sides/source

`--cluster=whole` is the same computation in one process: the reference.

    python -m experiments.train_abnet --eval_only --run=RUN --data_dir=FOLDER

translates the dev and test pairs of any text folder with what a run trained. The loops
are in `abnet/source`, `abnet/target` and `abnet/whole`; what crosses is in
`abnet/channels`.
"""

import functools
from collections.abc import Sequence

from experiments import cluster_process, configuration, here, shared_flags
from experiments.abnet import (
    config,
    data,
    models,
    report,
    source,
    target,
    target_model,
    translator,
    whole,
)
from nebula_jax.commands import fields
from nebula_jax.runtime import connect
from nebula_jax.runtime.connect import all_clusters
from nebula_jax.runtime.ranks import devices
from nebula_jax.runtime.records import checkpoints


def main() -> int:
    """Runs the part that --cluster names, or tests a run."""
    command = fields.read(shared_flags.Command)
    is_evaluation = configuration.is_evaluation(command, "train_abnet")
    configuration.take_model("train_abnet", config.FLAGS)
    run = config.from_flags()
    if is_evaluation:
        config.check_beams(run.agreed)
        return translator.evaluate(run)
    cluster = run.local.cluster
    all_clusters.check_place(run.local.connection(), cluster, config.CLUSTERS)
    config.check(run)
    devices.simulate(run.local.layout(), run.local.num_processes or 1)
    if cluster in ("all", "whole"):
        names = config.WHOLE if cluster == "whole" else config.CLUSTERS
        return here.run_here(EXPERIMENT, run, names)
    train = source.train if cluster == "source" else target.train
    return cluster_process.run(run, config.settings(run), train)


def _check_same_run(
    run: config.Run, names: Sequence[str], fingerprints: dict[str, str] | None = None
) -> None:
    settings = config.settings(run)
    for name in names:
        checkpoints.check_same_run(run.local.workdir, name, settings, fingerprints)


def _prepare(run: config.Run, names: Sequence[str]) -> here.Prepared:
    """Gives each side its text, and prepares the models."""
    _check_same_run(run, names)
    folders = data.split(run)
    # What is wrong with it shows before anything starts.
    encoder = {"source_model": models.load_source(run).digest}
    _check_same_run(run, names[-1:], encoder)
    target_model.prepare(run, folders[1])
    return here.Prepared(
        run,
        functools.partial(whole.train, run, folders),
        functools.partial(_arguments, run, folders),
    )


def _arguments(
    run: config.Run, folders: whole.Folders, cluster: str, reach: connect.Settings
) -> list[str]:
    """Returns the flags of one cluster's process, with its side of the text."""
    side_dir = str(folders[models.ROLES.index(cluster)])
    return here.arguments(run.with_local(side_dir=side_dir), cluster, reach)


EXPERIMENT = here.Experiment(
    module="experiments.train_abnet",
    prepare=_prepare,
    report=report,
    reported=(
        "source_model",
        "target_model",
        "data_dir",
        "corpora",
        "max_pairs",
        "wan",
        "max_in_flight",
        "mlm_head_steps",
        "held_out_pairs",
    ),
)


if __name__ == "__main__":
    shared_flags.run(main, config.DEFAULTS, names=config.FLAGS)
