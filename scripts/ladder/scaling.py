"""One cluster of 1, 2 and 4 processes: the same parameters, and what the sum costs.

Each is a real run of `experiments.pretrain_bert`, on CPUs and loopback. All have one
global batch, so they come to the same parameters. Every process sleeps as long in each
step, however many there are: the sleep stands in for a batch of its own, as in weak
scaling, which cores that processes share could not show.

N processes.
"""

import contextlib
import itertools
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from nebula_jax import errors
from nebula_jax.runtime.life import process
from nebula_jax.training import checkpoint, metrics
from scripts.ladder import programs
from scripts.ladder import settings as ladder_settings

WARM_UP = 2  # steps
LOG_LINES = 12  # of a failed run, in the error
FLOAT32 = 4  # bytes
SIZE = "tiny"
"""The model of these runs: small enough for loopback."""
BATCH = {"batch_size": 16, "max_length": 32, "micro_batches": 2}
"""The global batch: small, since its compute is to be small beside the sleep."""
COUNTERS = pathlib.Path("/proc/net/dev")
POLL_SECONDS = 0.02


class Run(NamedTuple):
    """A finished run of N processes."""

    step_seconds: list[float]
    """The seconds of each step after the warm-up."""
    losses: list[float]
    params: Any
    """The tree of parameters after the last step, on the host."""
    sums: programs.AllReduces | None
    """The counts of its compiled step; None of one process, or without its text."""
    loopback: float | None
    """Bytes that a process sent in a step, as the kernel counts them; None if it does
    not."""


def arguments(
    given: ladder_settings.Settings, vocabulary: pathlib.Path, processes: int
) -> list[str]:
    """Returns the flags of a run.

    Args:
      given: the settings.
      vocabulary: of all runs.
      processes: N.
    """
    agreed, local, steps = given.run.agreed, given.run.local, given.scaling_steps
    values = {
        **{"clusters": 1, "sync": "allreduce", "processes_per_cluster": processes},
        **{"model_size": SIZE, "dropout": 0.0, "all_reduce": "once", **BATCH},
        **{"steps": steps, "eval_every": steps, "checkpoint_every": steps},
        **{"eval_batches": 1, "log_every": 1, "eval_batch_size": BATCH["batch_size"]},
        **{"warmup_steps": agreed.warmup_steps, "learning_rate": agreed.learning_rate},
        **{"optimizer": agreed.optimizer, "seed": agreed.seed},
        **{"data_dir": local.data_dir, "prepared_dir": local.prepared_dir},
        **{"languages": ",".join(agreed.languages), "task_mix": agreed.task_mix},
        **{"vocabulary": vocabulary, "emulate_compute": given.emulated},
    }
    return [f"--{name}={value}" for name, value in values.items()]


def execute(
    given: ladder_settings.Settings, vocabulary: pathlib.Path, processes: int
) -> Run:
    """Does a run of N processes.

    Raises:
      errors.NebulaError: if it failed, with the end of what it printed.
    """
    with tempfile.TemporaryDirectory(prefix="nebula-scaling-") as name:
        folder = pathlib.Path(name)
        written = folder / "programs"
        command = [
            *(sys.executable, "-m", "experiments.pretrain_bert"),
            *arguments(given, vocabulary, processes),
            f"--workdir={folder / 'run'}",
        ]
        log = folder / "log.txt"
        with log.open("w") as stream, counted() as samples:
            begun = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=environment(written if processes > 1 else None),
            )
            try:
                status = begun.wait()
            finally:  # it writes to the folder until it has ended
                begun.terminate()
                begun.wait()
        if status:
            last = "\n  ".join(
                log.read_text(errors="replace").splitlines()[-LOG_LINES:]
            )
            raise errors.NebulaError(
                f"a run of {processes} processes ended with status {status}:\n  {last}"
            )
        cluster = folder / "run" / "cluster-0"
        records = [each for each in metrics.read(cluster) if "loss" in each]
        state = checkpoint.read(cluster / "checkpoints", given.scaling_steps)["state"]
        return Run(
            step_seconds(records),
            [each["loss"] for each in records],
            jax.tree.map(np.asarray, state["params"]),
            largest(written),
            sent(samples, records, processes),
        )


def environment(written: pathlib.Path | None) -> dict[str, str]:
    """Returns the environment of a run's processes.

    Args:
      written: a folder for the programs that XLA compiles; None to write none.
    """
    found = dict(os.environ)
    found.pop("JAX_COMPILATION_CACHE_DIR", None)  # what is read there is not written
    found["JAX_PLATFORMS"] = "cpu"
    if written is not None:
        more = f"--xla_dump_to={written} --xla_dump_hlo_as_text"
        found["XLA_FLAGS"] = f"{found.get('XLA_FLAGS', '')} {more}".strip()
    return found


def largest(written: pathlib.Path) -> programs.AllReduces | None:
    """Returns the all-reduces of the program that has most of them: the step's.

    Args:
      written: folder of the programs that XLA has written.
    """
    texts = written.glob("*after_optimizations.txt")
    found = [programs.all_reduces(each.read_text("utf-8")) for each in texts]
    return max(found, key=lambda each: each.bytes, default=None)


def step_seconds(records: Sequence[Mapping[str, Any]]) -> list[float]:
    """Returns the seconds of each step after the warm-up, but for the last one.

    Args:
      records: one for each step; the last one's has an evaluation before it.
    """
    times = [each["time"] for each in records[WARM_UP - 1 : -1]]
    return [after - before for before, after in itertools.pairwise(times)]


def loopback_bytes(text: str) -> int:
    """Returns the bytes that have been sent over loopback.

    Args:
      text: of /proc/net/dev.
    """
    for line in text.splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == "lo":
            return int(figures.split()[8])
    raise ValueError("there is no loopback device")


@contextlib.contextmanager
def counted() -> Iterator[list[tuple[float, int]]]:
    """Samples the bytes sent over loopback meanwhile: (time, bytes), by and by.

    The list stays empty where the kernel has no such counter.
    """
    samples: list[tuple[float, int]] = []
    is_over = threading.Event()

    def sample() -> None:
        while not is_over.wait(POLL_SECONDS):
            samples.append((time.time(), loopback_bytes(COUNTERS.read_text())))

    if not COUNTERS.is_file():
        yield samples
        return
    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        is_over.set()
        thread.join()


def sent(
    samples: Sequence[tuple[float, int]],
    records: Sequence[Mapping[str, Any]],
    processes: int,
) -> float | None:
    """Returns the bytes that a process sent in a step; the mean of all.

    A step's record is written before its processes begin the next one, so what the
    counter has then is of whole steps. All other traffic on loopback counts too.

    Args:
      samples: of `counted`.
      records: of each step.
      processes: N.
    """
    begin, end = (records[place]["time"] for place in (WARM_UP - 1, -2))
    before = [count for moment, count in samples if moment <= begin]
    after = [count for moment, count in samples if moment <= end]
    if processes == 1 or not before:
        return None
    steps = len(records) - 1 - WARM_UP
    return (after[-1] - before[-1]) / steps / processes


def ring_bytes(count: float, processes: int) -> float:
    """Returns what each process of a ring sends to add up `count` bytes."""
    return 2 * (processes - 1) / processes * count


def equality(params: Any, others: Any) -> dict[str, float]:
    """Compares two trees of parameters.

    Returns:
      difference: the largest; equal: the share of parameters equal to the last bit.
    """
    pairs = list(zip(jax.tree.leaves(params), jax.tree.leaves(others), strict=True))
    same = sum(int(np.sum(a == b)) for a, b in pairs)
    return {
        "difference": max(float(np.max(np.abs(a - b))) for a, b in pairs),
        "equal": same / sum(a.size for a, _ in pairs),
    }


def row(processes: int, run: Run, alone: Run, emulated: float) -> dict[str, Any]:
    """Returns the figures of a run.

    Args:
      processes: N.
      run: of N processes.
      alone: of one.
      emulated: seconds that each process sleeps in a step.
    """
    seconds, one = (statistics.median(each.step_seconds) for each in (run, alone))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(run.params))
    losses = zip(run.losses, alone.losses, strict=True)
    program = None if run.sums is None else ring_bytes(run.sums.bytes, processes)
    return {
        "processes": processes,
        "step_seconds": seconds,
        "not_slept": seconds - emulated,
        "efficiency": one / seconds,
        "exposed": 1 - one / seconds,
        "all_reduces": None if run.sums is None else run.sums.times,
        "bytes_formula": ring_bytes(FLOAT32 * parameters, processes),
        "bytes_program": program,
        "bytes_loopback": run.loopback,
        "loss_difference": max(abs(a - b) for a, b in losses),
        **equality(run.params, alone.params),
    }


def measure(
    given: ladder_settings.Settings, vocabulary: pathlib.Path
) -> dict[str, Any]:
    """Does the runs, and compares them.

    Args:
      given: the settings.
      vocabulary: of the ladder.

    Raises:
      errors.NebulaError: if one fails.
    """
    runs = {}
    for number in given.processes:
        what = f"a cluster of {number} process{'es' * (number > 1)}"
        with process.timed(f"{what}, {given.scaling_steps} steps"):
            runs[number] = execute(given, vocabulary, number)
    alone = runs[1]
    emulated = given.emulated / 1000
    return {
        "model": {
            "size": SIZE,
            "parameters": sum(leaf.size for leaf in jax.tree.leaves(alone.params)),
        },
        "batch": [BATCH["batch_size"], BATCH["max_length"]],
        "micro_batches": BATCH["micro_batches"],
        "steps": given.scaling_steps,
        "emulated_seconds": emulated,
        "rows": [row(number, run, alone, emulated) for number, run in runs.items()],
    }
