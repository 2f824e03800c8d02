"""Reproduces Table 3 and Fig. 8: M3 within one cluster, and across a slow line.

    python -m scripts.table3_throughput

Each seed trains the M3 of `m3_quickstart.flags` three times on this machine: with every
part in one process, with a process for each part and no line between them, and with
the paper's line (170 Mbit/s, 15 ms one way). All three must end with the same
parameters, bit for bit. For Fig. 8 a fourth run begins in one process and goes on
across the line. Runs are done once, one after the other; after a stop, the same command
goes on.
"""

import hashlib
import itertools
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from experiments import shared_flags
from nebula_jax import errors
from nebula_jax.runtime.life import process
from nebula_jax.runtime.records import report, run_folder
from nebula_jax.training import checkpoint, metrics
from scripts.tables import config, pictures, sweep
from scripts.tables import runs as table_runs

FLAGFILE = "m3_quickstart"
STEPS, WARM_UP, EVERY, LOG_EVERY = 400, 60, 100, 10
LINE = "--wan=170mbit,15ms"
KINDS = {  # a way to run -> its flags; a run that moves is the first, then the third
    "one process": ("--cluster=whole",),
    "one cluster": ("--cluster=all",),
    "two clusters": ("--cluster=all", LINE),
    "moved": (),
}
PARTS = ("discriminator", "generator:0", "generator:1")
MOVED_AT = 200  # its checkpoint is what it goes on from


def run_of(kind: str, table: config.Table, seed: str) -> table_runs.Run:
    """Describes the run of a kind, a key of KINDS."""
    return table_runs.Run(
        f"{kind.replace(' ', '-')}-seed{seed}",
        "experiments.pretrain_m3",
        (
            f"--flagfile={table_runs.flagfile(FLAGFILE)}",
            f"--prepared_dir={table.prepared_dir}",
            *(f"--steps={STEPS}", f"--eval_every={STEPS}", f"--seed={seed}"),
            *(f"--checkpoint_every={EVERY}", f"--log_every={LOG_EVERY}"),
            *KINDS[kind],
        ),
    )


def execute(run: table_runs.Run, workdir: pathlib.Path) -> None:
    """Runs the command; a run that moves begins in one process, and is stopped there.

    Raises errors.NebulaError if it fails.
    """
    if not run.name.startswith("moved"):
        table_runs.start(run, workdir)
        return
    saved = run_folder.of_cluster(workdir, PARTS[-1]) / f"checkpoints/{MOVED_AT:08d}"
    if not saved.is_dir():
        arguments = *run.arguments, *KINDS["one process"], f"--workdir={workdir}"
        command = [sys.executable, "-m", run.module, *arguments]
        with process.sigterm_as_exit(), subprocess.Popen(command) as begun:
            try:
                while not saved.is_dir():
                    if begun.poll() is not None:
                        raise errors.NebulaError(f"{run.name} ended before it moved")
                    time.sleep(0.05)
            finally:
                begun.terminate()
    across = run._replace(arguments=(*run.arguments, *KINDS["two clusters"]))
    table_runs.start(across, workdir)


def figures_of(run: table_runs.Run, workdir: pathlib.Path) -> dict[str, Any]:
    """Reads the time of a step, the loss curve and the parameters' digest of a run."""
    del run
    digest = hashlib.sha256()
    for part in PARTS:
        folder = run_folder.of_cluster(workdir, part) / "checkpoints"
        for leaf in jax.tree.leaves(checkpoint.read(folder, STEPS)):
            digest.update(np.ascontiguousarray(leaf).tobytes())
    records: dict[int, dict[str, Any]] = {}
    for name in ("whole", PARTS[0]):  # of a run that moved, both
        for each in metrics.read(workdir / name):
            # A run that is stopped also has a line for the steps since its last one.
            if "rtd_loss" in each and each["step"] % LOG_EVERY == 0:
                records.setdefault(each["step"], each | {"cluster": name})
    ordered = [records[step] for step in sorted(records)]
    timed = [each for each in ordered if each["step"] >= WARM_UP]
    seconds = [
        (after["time"] - before["time"]) / (after["step"] - before["step"])
        for before, after in itertools.pairwise(timed)
        if before["cluster"] == after["cluster"]
    ]
    names = ("step", "cluster", "rtd_loss", "clm_loss")
    return {
        "summary": report.read_summary(workdir),
        "digest": digest.hexdigest(),
        "step_seconds": statistics.median(seconds),
        "waiting_share": statistics.fmean(
            each.get("waiting_share", 0.0) for each in timed
        ),
        "curve": [{name: each[name] for name in names} for each in ordered],
    }


def record(runs: table_runs.Runs, table: config.Table) -> dict[str, Any]:
    """Returns the record; does the runs that have not been done."""
    kinds = [kind for kind in KINDS if kind != "moved"]
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for seed in table.seeds:
        for kind in kinds:
            found[kind].append(runs.result(run_of(kind, table, seed)))
    moved = runs.result(run_of("moved", table, table.seeds[0]))
    plain = found[kinds[0]]
    digests = [each["digest"] for each in plain]
    return {
        "rows": [
            {
                "kind": kind,
                "step_seconds": [each["step_seconds"] for each in by_seed],
                "waiting_share": [each["waiting_share"] for each in by_seed],
                "is_identical": [each["digest"] for each in by_seed] == digests,
            }
            for kind, by_seed in found.items()
        ],
        "moved": {
            "is_identical": moved["digest"] == digests[0],
            "curve": moved["curve"],
            "never_moved": plain[0]["curve"],
        },
    }


def markdown(record: Mapping[str, Any]) -> str:
    """Renders the record, beside the paper's figures."""
    rows, moved = record["rows"], record["moved"]
    (base,) = (row["step_seconds"] for row in rows if row["kind"] == "one cluster")
    here, across = sweep.PAPER["table3"]
    known = {"one cluster": here, "two clusters": across}

    def throughput(row: Mapping[str, Any]) -> float:
        pairs = zip(base, row["step_seconds"], strict=True)
        return statistics.median(before / after for before, after in pairs)

    columns = [
        sweep.Column("where the parts are", "kind"),
        sweep.Column(
            "ms a step, by seed",
            lambda row: [1000 * each for each in row["step_seconds"]],
            ".0f",
        ),
        sweep.Column("throughput", throughput, ".2f"),
        sweep.Column("paper", lambda row: known.get(row["kind"]), ".2f"),
        sweep.Column(
            "discriminator waits",
            lambda row: statistics.fmean(row["waiting_share"]),
            ".0%",
        ),
        sweep.Column(
            "same parameters", lambda row: "yes" if row["is_identical"] else "**no**"
        ),
    ]
    last = max(each["step"] for each in moved["curve"] if each["cluster"] == "whole")
    same = "are those" if moved["is_identical"] else "are **not** those"
    return report.join(
        report.heading(record, report.seeds(record), " of runs"),
        sweep.table(columns, rows, "lrrrrl"),
        f"Fig. 8: a run that begins in one process and goes on across {LINE[6:]} after"
        f" step {last}. Its parameters after step {STEPS} {same} of the run that never"
        " moved, bit for bit.",
    )


SWEEP = sweep.Sweep(
    "table3",
    record,
    markdown,
    figures=figures_of,
    execute=execute,
    draw=pictures.table3,
    needs_text=False,
)

if __name__ == "__main__":
    names = ["seeds", "out", "workdir", "results_dir", "prepared_dir"]
    shared_flags.run(SWEEP.run, names=names)
