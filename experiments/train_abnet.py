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
from typing import Any

from absl import flags

from experiments import launcher, lifecycle, saved, shared_flags
from experiments.abnet import config as abnet_config
from experiments.abnet import data as abnet_data
from experiments.abnet import models as abnet_models
from experiments.abnet import report as abnet_report
from experiments.abnet import scaled_wan, source, target, whole

flags.adopt_module_key_flags(shared_flags)
flags.adopt_module_key_flags(abnet_config)
flags.adopt_module_key_flags(abnet_data)

CLUSTERS = ("target", "source")  # the first one listens


def main() -> int:
    """Does what --cluster says."""
    shared_flags.check_shared_flags("target", "source", no_line=scaled_wan.AUTO)
    scaled_wan.check()
    abnet_config.check()
    cluster = shared_flags.CLUSTER.value
    if cluster not in ("all", "whole", *CLUSTERS):
        raise shared_flags.FlagError(
            f"--cluster={cluster}: expected all, whole, source or target"
        )
    abnet_data.check()
    shared_flags.simulate_devices()
    if cluster in ("all", "whole"):
        with lifecycle.alone_in(shared_flags.workdir()):
            return _run_here()
    folder = shared_flags.cluster_folder(cluster)
    with lifecycle.alone_in(folder):
        saved.check_same_run(cluster, abnet_config.settings(abnet_data.PAIR.value))
        shared_flags.write_run_flags(folder / "run.flags", {})
        return source.run() if cluster == "source" else target.run()


def _run_here() -> int:
    """Gives each side its text, prepares the models, runs the clusters, reports."""
    begin = time.monotonic()
    is_whole = shared_flags.CLUSTER.value == "whole"
    names = ("whole",) if is_whole else CLUSTERS
    agreed = abnet_config.settings(abnet_data.PAIR.value)
    for name in names:
        saved.check_same_run(name, agreed)
    with contextlib.ExitStack() as stack:
        if not is_whole:
            launch = stack.enter_context(launcher.prepared(names))
        source_text, target_text = abnet_data.split()
        abnet_models.load_source()
        abnet_models.prepare_target(target_text)
        scaled_wan.settle((source_text, target_text))
        overrides = {"workdir": str(shared_flags.workdir())}
        shared_flags.write_run_flags(shared_flags.workdir() / "run.flags", overrides)
        if is_whole:
            status = whole.run((source_text, target_text))
        else:
            own = {
                "source": {"text": str(source_text)},
                "target": {"text": str(target_text)},
            }
            status = launch("experiments.train_abnet", overrides, own)
    if status == 0:
        abnet_report.report(
            shared_flags.workdir(),
            {name: shared_flags.cluster_folder(name) for name in names},
            _settings(),
            abnet_config.buckets(),
            scaled_wan.read(shared_flags.workdir()),
            time.monotonic() - begin,
        )
    return status


def _settings() -> dict[str, Any]:
    """Returns the flags that a report records."""
    names = (
        *abnet_config.AGREED,
        *("source_model", "target_model", "data_dir", "pair_sources"),
        *("max_pairs", "wan", "ahead", "head_steps"),
    )
    return {name: flags.FLAGS[name].value for name in names}


if __name__ == "__main__":
    lifecycle.run(main)
