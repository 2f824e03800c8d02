"""Measures the speed-up from more workers in the discriminator's cluster (Table 4).

    python -m scripts.table4_speedup

One generator feeds a discriminator of 1, 2, 4 and 8 processes, with as many
micro-batches in a step (--fan_out), over an emulated line. The processes, what crosses
between the clusters and inside them, and the training of a small model are real. Eight
workers have no eight machines here: what a larger model would compute is a sleep of the
length that its step takes this machine alone (--emulate_compute). So what the system
adds is what is measured.
"""

import functools
import itertools
import json
import pathlib
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from experiments import shared_flags
from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.models import transformer
from nebula_jax.runtime.life import process
from nebula_jax.runtime.records import report
from nebula_jax.training import m3, m3_steps, metrics
from scripts.bench import harness
from scripts.tables import config, sweep
from scripts.tables import runs as table_runs

WORKERS = (1, 2, 4, 8)
GENERATOR_DEVICES = 8  # of its cluster, as in the paper: they share its micro-batch
SIZES = "base", "large"  # the paper's two models, whose steps are slept
PIECES = 8000
ROWS, LENGTH = 32, 64
STEPS, WARM_UP = 9, 2
LONGEST_SECONDS = 3600.0  # of a run, on a busy machine
SETTINGS = (
    *("--data_dir=package:django", "--generators=en de fr es", "--task_mix=mrtd=1"),
    *("--generator_size=nano", "--discriminator_size=nano", "--vocab_size=1000"),
    *("--generator_layers=1", "--discriminator_layers=1"),
    *(f"--batch_size={ROWS}", f"--max_length={LENGTH}", f"--steps={STEPS}"),
    *(f"--eval_every={STEPS}", "--eval_batches=1", f"--checkpoint_every={STEPS}"),
    *("--log_every=1", "--window=2", "--tls=off", "--connect_timeout=300"),
    *("--peer_timeout=120", "--stuck_timeout=600", "--devices_per_cluster=0"),
)
LINE = "--wan=170mbit,15ms"


def measured() -> dict[str, float]:
    """Measures a micro-batch of the generator and of the discriminator, in seconds."""
    models = [
        transformer.config_of_size(size, max_length=LENGTH, vocab_size=PIECES)
        for size in SIZES
    ]
    model = m3.Config(*models, steps=1000)
    generator, discriminator = (
        jax.jit(functools.partial(step, model))
        for step in (m3_steps.generator_step, m3_steps.discriminator_step)
    )
    text = np.full((ROWS, LENGTH), vocabularies.NUM_SPECIAL, np.int32)
    generates = jax.jit(functools.partial(m3.init_generator, model, 0, 0))()
    discriminates = jax.jit(functools.partial(m3.init_discriminator, model, 0))()
    _, tokens, _ = generator(generates, text)
    steps = {
        "generator": functools.partial(generator, generates, text),
        "discriminator": functools.partial(discriminator, discriminates, [tokens]),
    }
    return {name: min(each) for name, each in harness.time_runs(steps, 3).items()}


def run_of(workers: int, seconds: Mapping[str, float]) -> table_runs.Run:
    """Describes the run with so many workers, whose sleeps are those `measured`."""
    generator = 1000 * seconds["generator"] / GENERATOR_DEVICES
    emulated = f"{round(generator)},{round(1000 * seconds['discriminator'])}"
    own = f"--fan_out={workers}", f"--emulate_compute={emulated}"
    return table_runs.Run(
        f"workers{workers}-{emulated.replace(',', '-')}",
        "experiments.pretrain_m3",
        (*SETTINGS, LINE, *own),
    )


def execute(run: table_runs.Run, workdir: pathlib.Path) -> None:
    """Runs a generator and the discriminator's workers; NebulaError if one fails."""
    vocabulary = workdir.parent / "vocabulary.model"
    if not vocabulary.exists():
        given = [each for each in SETTINGS if each.split("=")[0] in OF_VOCABULARY]
        _run("scripts.train_vocabulary", [(*given, f"--out={vocabulary}")])
    (workers,) = (int(each[10:]) for each in run.arguments if "--fan_out=" in each)
    listen, coordinator = (f"127.0.0.1:{harness.free_port()}" for _ in range(2))
    common = *run.arguments, f"--workdir={workdir}", f"--vocabulary={vocabulary}"
    discriminator = ("--cluster=discriminator", f"--listen={listen}")
    members = [
        (
            f"--coordinator={coordinator}",
            f"--num_processes={workers}",
            f"--process_id={k}",
        )
        for k in range(workers)
    ]
    parts = [(*discriminator, *each) for each in (members if workers > 1 else [()])]
    parts.append(("--cluster=generator:0", f"--peer={listen}"))
    _run(run.module, [(*common, *each) for each in parts])


OF_VOCABULARY = ("--data_dir", "--generators", "--task_mix", "--vocab_size")


def _run(module: str, parts: Sequence[Sequence[str]]) -> None:
    """Runs processes with these arguments at once; none is left, whatever happens."""
    with process.sigterm_as_exit():
        commands = [[sys.executable, "-m", module, *each] for each in parts]
        harness.together(commands, LONGEST_SECONDS)


def figures(run: table_runs.Run, workdir: pathlib.Path) -> dict[str, Any]:
    """Reads the seconds of each step after the warm-up."""
    del run
    folder = workdir / "discriminator"
    times = [each["time"] for each in metrics.read(folder) if "loss" in each]
    seconds = [after - before for before, after in itertools.pairwise(times)]
    return {
        "summary": {
            **report.provenance(times[-1] - times[0]),
            "step_seconds": seconds[WARM_UP:],
        }
    }


def record(runs: table_runs.Runs, table: config.Table) -> dict[str, Any]:
    """Returns the record; measures and runs what has not been done."""
    path = table.workdir / "measured.json"
    if not path.is_file():
        with process.timed("measuring a step"):
            report.write(path, measured())
    seconds = json.loads(path.read_text())
    found = {
        workers: runs.result(run_of(workers, seconds))["summary"] for workers in WORKERS
    }
    rows = [
        {"workers": workers, "step_seconds": statistics.median(each["step_seconds"])}
        for workers, each in found.items()
    ]
    return {"measured": seconds, "micro_batch": [ROWS, LENGTH], "rows": rows}


def markdown(record: Mapping[str, Any]) -> str:
    """Renders the record, beside the paper's figures."""
    seconds, (height, length) = record["measured"], record["micro_batch"]
    alone = record["rows"][0]["step_seconds"]
    generator, discriminator = (
        1000 * seconds[name] for name in ("generator", "discriminator")
    )
    columns = [
        sweep.Column("workers", "workers"),
        sweep.Column("ms a step", lambda row: 1000 * row["step_seconds"], ".0f"),
        sweep.Column(
            "of these not slept",
            lambda row: 1000 * row["step_seconds"] - discriminator,
            ".0f",
        ),
        sweep.Column(
            "speed-up", lambda row: row["workers"] * alone / row["step_seconds"], ".2f"
        ),
        # The paper counts NPUs, of which a worker has eight.
        sweep.Column(
            "paper",
            lambda row: sweep.PAPER["table4"].get(str(8 * row["workers"])),
            ".2f",
        ),
    ]
    return report.join(
        report.heading(record, "seed 0", " of runs"),
        sweep.table(columns, record["rows"], "r" * len(columns)),
        f"**A sleep stands in for a worker's compute** (--emulate_compute):"
        f" {discriminator:.0f} ms a step, measured here with the paper's discriminator"
        f" and {height} rows of {length} tokens; for a micro-batch of its generator"
        f" {generator:.0f} ms, shared by {GENERATOR_DEVICES} devices. Its 8 NPUs are"
        " one worker here, and 64 eight. All else is real, on two cores for all"
        " processes: the line, what a cluster's processes exchange, and the training of"
        " a model with one layer.",
    )


SWEEP = sweep.Sweep(
    "table4",
    record,
    markdown,
    figures=figures,
    execute=execute,
    seeds=1,
    needs_text=False,
)

if __name__ == "__main__":
    shared_flags.run(SWEEP.run, names=["out", "workdir"])
