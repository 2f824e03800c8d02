"""Scenario I: pre-train a discriminator from remote generators (Fig. 4 and 6).

    python -m experiments.pretrain_m3 --flagfile=experiments/flags/m3_quickstart.flags

starts two generators and a discriminator here, on real text in 15 languages. On real
clusters each runs its own part of the same flagfile:

    ... --cluster=discriminator --listen=0.0.0.0:7070 --vocabulary=shared.model
    ... --cluster=generator:0 --peer=d.example:7070 --vocabulary=shared.model

`--cluster=whole` is the same computation uncut, in one process: the reference. The
loops are in `m3_generator`, `m3_discriminator` and `m3_whole`.
"""

import time

from absl import flags

from experiments import (
    clusters,
    launcher,
    m3_discriminator,
    m3_generator,
    m3_report,
    m3_setup,
    m3_whole,
)
from nebula_jax.data import mixtures

flags.adopt_module_key_flags(clusters)
flags.adopt_module_key_flags(m3_setup)


def main() -> int:
    """Does what --cluster says."""
    clusters.check_shared_flags()
    match clusters.CLUSTER.value.split(":"):
        case ["all" | "whole"]:
            return _here()
        case ["discriminator"]:
            found = m3_setup.groups(data_dir=None)
            mixtures.parse_tasks(m3_setup.TASKS.value, found)
            run = m3_discriminator.run
        case ["generator", index] if index.isdigit():
            found = m3_setup.check_text()
            if int(index) >= len(found):
                raise clusters.FlagError(
                    f"--cluster=generator:{index}: --generators has {len(found)},"
                    " counted from 0"
                )
            run = lambda: m3_generator.run(int(index))  # noqa: E731
        case _:
            raise clusters.FlagError(
                f"--cluster={clusters.CLUSTER.value}: expected all, whole,"
                " discriminator or generator:K"
            )
    m3_setup.given_vocabulary()
    clusters.write_run_flags(
        clusters.cluster_folder(clusters.CLUSTER.value) / "run.flags", {}
    )
    return run()


def _here() -> int:
    """Prepares text and vocabulary, runs every cluster here, and reports."""
    begin = time.monotonic()
    found = m3_setup.check_text()
    path = m3_setup.shared_vocabulary(found)
    overrides = {
        "generators": m3_setup.written_out(found),
        "vocabulary": str(path),
        "workdir": str(clusters.workdir()),
    }
    clusters.write_run_flags(clusters.workdir() / "run.flags", overrides)
    for name, value in overrides.items():
        flags.FLAGS[name].value = value
    vocabulary = m3_setup.given_vocabulary()
    with clusters.timed("preparing the text"):
        for index in range(len(found)):
            m3_setup.open_generator(index, vocabulary)

    names = ["discriminator", *(f"generator:{index}" for index in range(len(found)))]
    if clusters.CLUSTER.value == "whole":
        names = ["whole"]
        status = m3_whole.run()
    else:
        status = launcher.launch("experiments.pretrain_m3", names, overrides)
    if status == 0:
        m3_report.write(names, time.monotonic() - begin, vocabulary.size)
    return status


if __name__ == "__main__":
    clusters.run(main)
