"""Scenario I: pre-train a discriminator from remote generators (Fig. 4 and 6).

    python -m experiments.pretrain_m3 --flagfile=experiments/flags/m3_quickstart.flags

starts two generators and a discriminator here, on real text in 15 languages. On real
clusters each runs its own part of the same flagfile:

    ... --cluster=discriminator --listen=0.0.0.0:7070 --vocabulary=shared.model
    ... --cluster=generator:0 --peer=d.example:7070 --vocabulary=shared.model

with the languages of each generator written out (--generators="en de|hi ur").
`--cluster=whole` is the same computation uncut, in one process: the reference. The
loops are in `m3_generator`, `m3_discriminator` and `m3_whole`.
"""

import contextlib
import functools
import time

from absl import flags

from experiments import (
    clusters,
    launcher,
    lifecycle,
    m3_discriminator,
    m3_generator,
    m3_models,
    m3_report,
    m3_setup,
    m3_text,
    m3_whole,
    saved,
)
from nebula_jax.data import mixtures

flags.adopt_module_key_flags(clusters)
flags.adopt_module_key_flags(m3_setup)


def main() -> int:
    """Does what --cluster says."""
    clusters.check_shared_flags("discriminator", "generator")
    clusters.simulate_devices()
    m3_models.check()
    match clusters.CLUSTER.value.split(":"):
        case ["all" | "whole"]:
            with lifecycle.alone_in(clusters.workdir()):
                return _run_here()
        case ["discriminator"]:
            owners = m3_text.groups(data_dir=None)
            mixtures.parse_tasks(m3_setup.TASKS.value, owners)
            run = m3_discriminator.run
        case ["generator", index] if index.isdigit():
            owners = m3_text.check(only=int(index))
            run = functools.partial(m3_generator.run, int(index))
        case _:
            raise clusters.FlagError(
                f"--cluster={clusters.CLUSTER.value}: expected all, whole,"
                " discriminator or generator:K"
            )
    cluster = clusters.CLUSTER.value
    agreed = m3_setup.settings(m3_text.given_vocabulary(), owners)
    with lifecycle.alone_in(clusters.cluster_folder(cluster)):
        saved.check_same_run(cluster, agreed)
        clusters.write_run_flags(clusters.cluster_folder(cluster) / "run.flags", {})
        return run()


def _run_here() -> int:
    """Prepares text and vocabulary, runs every cluster here, and reports."""
    begin = time.monotonic()
    owners = m3_text.check()
    is_whole = clusters.CLUSTER.value == "whole"
    names = ["discriminator", *(f"generator:{k}" for k in range(len(owners)))]
    if is_whole:
        names = ["whole"]
    with contextlib.ExitStack() as stack:
        if not is_whole:
            launch = stack.enter_context(launcher.prepared(names))
        overrides = {
            "generators": mixtures.write_groups(owners),
            "vocabulary": str(m3_text.shared_vocabulary(owners)),
            "workdir": str(clusters.workdir()),
        }
        for name, value in overrides.items():
            flags.FLAGS[name].value = value
        vocabulary = m3_text.given_vocabulary()
        agreed = m3_setup.settings(vocabulary, owners)
        for name in names:
            saved.check_same_run(name, agreed)
        clusters.write_run_flags(clusters.workdir() / "run.flags", overrides)
        with lifecycle.timed("preparing the text"):
            for index in range(len(owners)):
                m3_text.open_generator(index, vocabulary)
        if is_whole:
            status = m3_whole.run()
        else:
            status = launch("experiments.pretrain_m3", overrides)
    if status == 0:
        m3_report.report(names, time.monotonic() - begin, vocabulary.size)
    return status


if __name__ == "__main__":
    lifecycle.run(main)
