"""Scenario II: a translator whose halves never show each other their text (Fig. 5, 7).

    python -m experiments.train_abnet \
        --flagfile=experiments/flags/abnet_quickstart.flags

starts the source and the target cluster here. On real clusters each runs its own part
of the same flagfile, with its own side of the text (scripts/split_parallel.py):

    ... --cluster=target --listen=0.0.0.0:7070 --text=target_side
    ... --cluster=source --peer=t.example:7070 --text=source_side

`--cluster=whole` is the same computation in one process: the reference. With
`--wan=auto-dilated` the line is as slow beside this machine as the paper's was beside
its own (`dilation`). The loops are in `abnet_source`, `abnet_target` and
`abnet_whole`; what crosses is in `abnet_line`.
"""

import contextlib
import time

from absl import flags

from experiments import (
    abnet_models,
    abnet_report,
    abnet_setup,
    abnet_source,
    abnet_target,
    abnet_text,
    abnet_whole,
    clusters,
    dilation,
    launcher,
    lifecycle,
    saved,
)

flags.adopt_module_key_flags(clusters)
flags.adopt_module_key_flags(abnet_setup)
flags.adopt_module_key_flags(abnet_text)

CLUSTERS = ("target", "source")  # the first one listens


def main() -> int:
    """Does what --cluster says."""
    clusters.check_shared_flags("target", "source", no_line=dilation.AUTO)
    dilation.check()
    abnet_setup.check()
    cluster = clusters.CLUSTER.value
    if cluster not in ("all", "whole", *CLUSTERS):
        raise clusters.FlagError(
            f"--cluster={cluster}: expected all, whole, source or target"
        )
    abnet_text.check()
    clusters.simulate_devices()
    if cluster in ("all", "whole"):
        with lifecycle.alone_in(clusters.workdir()):
            return _run_here()
    folder = clusters.cluster_folder(cluster)
    with lifecycle.alone_in(folder):
        saved.check_same_run(cluster, abnet_setup.settings(abnet_text.PAIR.value))
        clusters.write_run_flags(folder / "run.flags", {})
        return abnet_source.run() if cluster == "source" else abnet_target.run()


def _run_here() -> int:
    """Gives each side its text, prepares the models, runs the clusters, reports."""
    begin = time.monotonic()
    is_whole = clusters.CLUSTER.value == "whole"
    names = ("whole",) if is_whole else CLUSTERS
    agreed = abnet_setup.settings(abnet_text.PAIR.value)
    for name in names:
        saved.check_same_run(name, agreed)
    with contextlib.ExitStack() as stack:
        if not is_whole:
            launch = stack.enter_context(launcher.prepared(names))
        source_text, target_text = abnet_text.split()
        abnet_models.load_source()
        abnet_models.prepare_target(target_text)
        dilation.settle((source_text, target_text))
        overrides = {"workdir": str(clusters.workdir())}
        clusters.write_run_flags(clusters.workdir() / "run.flags", overrides)
        if is_whole:
            status = abnet_whole.run((source_text, target_text))
        else:
            own = {
                "source": {"text": str(source_text)},
                "target": {"text": str(target_text)},
            }
            status = launch("experiments.train_abnet", overrides, own)
    if status == 0:
        abnet_report.report(names, time.monotonic() - begin)
    return status


if __name__ == "__main__":
    lifecycle.run(main)
