"""Measures a step of an ABNet run here, and so the line that is the paper's at scale.

    python -m scripts.tables.scaled_line --flagfile=... --workdir=...

Table 5 was measured between two clusters of 8 V100. Its baseline sends 128 sentences x
64 tokens x 768 units as float32, 201.3 Mbit, each way a step: 3.355 s at 60 Mbit/s. A
step takes 4.42 s. If both directions overlapped wholly, 1.07 s of it are left for
everything else; a line fitted through the ten rows leaves 0 to 0.16 s, and the model's
8.7 TFLOP take about 0.11 s. So compute is a tenth of the wire's one way, 0.34 s, or
less. We take a tenth, which is the hardest case: the less the wire weighs, the less can
be hidden behind it and the less compression gains.

Here the machine computes many times slower, and the tensors are smaller. So a step is
measured, both halves in one process without a codec, and the line is given the rate at
which padded float32 takes 10 times as long one way. The one-way delay of 15 ms is
scaled like the compute.
"""

import statistics
import time
from typing import Any

import jax

from experiments import shared_flags
from experiments.abnet import config, data, target_model, whole
from nebula_jax.runtime.life import process
from nebula_jax.runtime.records import report

MODULE = "scripts.tables.scaled_line"
WIRE_OVER_COMPUTE = 10.0
PAPER_BITS = 128 * 64 * 768 * 32  # section 4.2: batch, length, width, float32
PAPER_RATE = 60e6  # bits per second, section 4.3
PAPER_DELAY = 0.015  # seconds; our choice, as in flags/wan_60mbit.flags
PAPER_COMPUTE = PAPER_BITS / PAPER_RATE / WIRE_OVER_COMPUTE  # 0.336 s
MEASURED_STEPS = 5  # after one that compiles


def scale(compute_seconds: float, padded_bits: int) -> dict[str, Any]:
    """Returns the line on which padded float32 takes 10 times the compute, one way.

    >>> scale(0.5, 10_000_000)["wan"]
    '2000kbit,22.35ms'

    Args:
      compute_seconds: of a step, both halves, without codec and line.
      padded_bits: of its hidden states as padded float32, one way.

    Returns:
      wan: for --wan. factor: this machine's compute time over the paper's. rate: bits a
      second. delay: seconds, one way. And the arguments.
    """
    rate = padded_bits / (WIRE_OVER_COMPUTE * compute_seconds)
    factor = compute_seconds / PAPER_COMPUTE
    delay = PAPER_DELAY * factor
    return {
        "wan": f"{rate / 1e3:.0f}kbit,{1e3 * delay:.2f}ms",
        "factor": factor,
        "compute_seconds": compute_seconds,
        "padded_bits": padded_bits,
        "rate": rate,
        "delay": delay,
    }


def measure(run: config.Run, folders: whole.Folders) -> tuple[float, int]:
    """Measures a step of the largest bucket, both halves without codecs.

    Args:
      run: its configuration.
      folders: text of source and target.

    Returns:
      The arguments of `scale`; the seconds are the median of several steps.
    """
    run = run.with_agreed(forward_codec="identity", backward_codec="identity")
    agreed, both = run.agreed, whole.load(run, folders)
    order = both.batches[0].order
    steps = range(1, order.steps_per_epoch + 1)
    step = max(steps, key=lambda step: order.batch(step - 1).bucket)
    saved, take_step = whole.fresh(agreed, both).init(), whole.in_process(both)
    seconds = []
    for _ in range(1 + MEASURED_STEPS):
        start = time.perf_counter()
        saved, _ = whole.whole_step(both, take_step, saved, step)
        jax.block_until_ready(saved)
        seconds.append(time.perf_counter() - start)
    length = agreed.length_buckets[order.batch(step - 1).bucket]
    padded = 32 * agreed.batch_size * length * both.width
    return statistics.median(seconds[1:]), padded


def main() -> int:
    """Measures, and writes summary.json into the run's folder."""
    begin, run = time.monotonic(), config.from_flags()
    config.check(run)
    folders = data.split(run)
    target_model.prepare(run, folders[1])
    with process.timed("measuring a step's compute"):
        line = scale(*measure(run, folders))
    record = report.provenance(time.monotonic() - begin) | {"line": line}
    report.write(run.local.workdir / "summary.json", record)
    return 0


if __name__ == "__main__":
    shared_flags.run(main, config.DEFAULTS, names=config.FLAGS)
