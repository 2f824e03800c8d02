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

from experiments import launcher, lifecycle, saved, shared_flags
from experiments.m3 import config as m3_config
from experiments.m3 import data as m3_data
from experiments.m3 import discriminator, generator, whole
from experiments.m3 import models as m3_models
from experiments.m3 import report as m3_report
from nebula_jax.data import language_mixture

flags.adopt_module_key_flags(shared_flags)
flags.adopt_module_key_flags(m3_config)


def main() -> int:
    """Does what --cluster says."""
    shared_flags.check_shared_flags("discriminator", "generator")
    shared_flags.simulate_devices()
    m3_models.check()
    match shared_flags.CLUSTER.value.split(":"):
        case ["all" | "whole"]:
            with lifecycle.alone_in(shared_flags.workdir()):
                return _run_here()
        case ["discriminator"]:
            owners = m3_data.groups(data_dir=None)
            language_mixture.parse_tasks(m3_config.TASKS.value, owners)
            run = discriminator.run
        case ["generator", index] if index.isdigit():
            owners = m3_data.check(only=int(index))
            run = functools.partial(generator.run, int(index))
        case _:
            raise shared_flags.FlagError(
                f"--cluster={shared_flags.CLUSTER.value}: expected all, whole,"
                " discriminator or generator:K"
            )
    cluster = shared_flags.CLUSTER.value
    agreed = m3_config.settings(m3_data.given_vocabulary(), owners)
    with lifecycle.alone_in(shared_flags.cluster_folder(cluster)):
        saved.check_same_run(cluster, agreed)
        shared_flags.write_run_flags(
            shared_flags.cluster_folder(cluster) / "run.flags", {}
        )
        return run()


def _run_here() -> int:
    """Prepares text and vocabulary, runs every cluster here, and reports."""
    begin = time.monotonic()
    owners = m3_data.check()
    is_whole = shared_flags.CLUSTER.value == "whole"
    names = ["discriminator", *(f"generator:{k}" for k in range(len(owners)))]
    if is_whole:
        names = ["whole"]
    with contextlib.ExitStack() as stack:
        if not is_whole:
            launch = stack.enter_context(launcher.prepared(names))
        overrides = {
            "generators": language_mixture.format_groups(owners),
            "vocabulary": str(m3_data.shared_vocabulary(owners)),
            "workdir": str(shared_flags.workdir()),
        }
        for name, value in overrides.items():
            flags.FLAGS[name].value = value
        vocabulary = m3_data.given_vocabulary()
        agreed = m3_config.settings(vocabulary, owners)
        for name in names:
            saved.check_same_run(name, agreed)
        shared_flags.write_run_flags(shared_flags.workdir() / "run.flags", overrides)
        with lifecycle.timed("preparing the text"):
            for index in range(len(owners)):
                m3_data.open_generator(index, vocabulary)
        if is_whole:
            status = whole.run()
        else:
            status = launch("experiments.pretrain_m3", overrides)
    if status == 0:
        m3_report.report(names, time.monotonic() - begin, vocabulary.size)
    return status


if __name__ == "__main__":
    lifecycle.run(main)
