"""Plans a run of M3 before a cluster is started: time, bottleneck, settings.

    python -m scripts.plan --flagfile=experiments/flags/m3_paper.flags \\
        --cluster_devices=8,64 --device_tflops=50,50 --wan=170mbit,15ms
    python -m scripts.plan --flagfile=experiments/flags/m3_quickstart.flags \\
        --wan=60mbit,15ms

Nothing is started, and no weights are made: both models are traced, the codecs give the
bytes on the line, and `parallel/planner.py` runs the clusters' pace in virtual time.
Devices are as fast as --device_tflops, or as this machine. Settings that the run would
refuse are refused, and so are --pipeline and --emulate_compute, of which a plan has
nothing. ABNet is not planned, as a plan knows neither what a micro-batch costs nor the
lengths of the text: a short run with --trace says where the time goes.
"""

import os
import pathlib
import time
from typing import Any

from experiments import shared_flags
from nebula_jax.parallel import planner
from nebula_jax.runtime.life import process
from nebula_jax.runtime.records import report
from scripts.plans import advice, count, m3, settings, speed
from scripts.plans import text as plan_text


def plan(given: settings.Settings) -> dict[str, Any]:
    """Returns the numbers of a plan.

    Args:
      given: its settings.

    Raises:
      errors.NebulaError: at settings that cannot work.
    """
    local = given.run.local
    m3.check(given)
    halves = m3.halves(given)
    sides = list(zip(halves, given.devices, strict=True))
    parts = [
        count.part(half, number, local.fsdp, local.model_parallel)
        for half, number in sides
    ]
    speeds = _speeds(given, halves)
    compute = {
        part.name: each.compute(part, number)
        for part, each, number in zip(parts, speeds, given.devices, strict=True)
    }
    cores = float(os.cpu_count() or 1) if given.is_shared else None
    run = m3.pace(given, compute, given.lines)
    found = planner.time_of(run, cores)
    generators, discriminator = given.devices
    counts = generators * m3.generators(given.run), discriminator
    return {
        "heading": _heading(given, counts, speeds),
        "parts": [
            _part(part, compute[part.name], number, given.run.agreed.fan_out)
            for part, number in zip(parts, given.devices, strict=True)
        ],
        "lines": _lines(given, run, found),
        "step": _step(given, found, sum(counts)),
        "savings": advice.savings(run, cores),
        "busy": _busy(found),
        "advice": advice.of_m3(given, run, cores),
        "assumptions": _assumptions(given),
    }


def _speeds(given: settings.Settings, halves: list[count.Half]) -> list[speed.Speed]:
    if given.tflops:
        return [speed.Speed(1e12 * each) for each in given.tflops]
    with process.timed("measuring this machine's speed"):
        return [speed.measure(half) for half in halves]


def _heading(
    given: settings.Settings, counts: tuple[int, int], speeds: list[speed.Speed]
) -> list[str]:
    tflops = ", ".join(f"{each.flops / 1e12:.3g}" for each in speeds)
    measured = (
        f"Speed: {tflops} TFLOP/s sustained by a device of each side, as given."
        if given.tflops
        else f"Speed: {tflops} TFLOP/s sustained by a device of each side, measured"
        " here (--device_tflops gives that of others)."
    )
    names = [
        f"{name} on {number} device{'s' if number > 1 else ''}"
        for name, number in zip(m3.SIDES, counts, strict=True)
    ]
    line = given.wan or "no limit"
    return [f"m3: {', '.join(names)}; line: {line}.", measured]


def _part(
    part: count.Part, compute: planner.Compute, devices: int, repeats: int
) -> dict[str, Any]:
    name = "each generator" if part.name == "generators" else part.name
    return {
        "name": name,
        "devices": devices,
        "trained": part.trained,
        "forward_flop": repeats * part.forward,
        "backward_flop": repeats * part.backward,
        "forward_s": repeats * compute.forward,
        "backward_s": repeats * compute.backward,
        "memory_bytes": part.state_bytes + part.working_bytes,
    }


def _lines(
    given: settings.Settings, run: planner.M3, found: planner.Time
) -> list[dict[str, Any]]:
    """Returns the bytes of a step in both directions of one line."""
    names = "generator -> discriminator (each)", "step tokens back"
    sent = run.fan_out * run.message_bytes, planner.TOKEN_BYTES
    ways = given.lines.up, given.lines.down
    return [
        {
            "name": name,
            "bytes": each,
            "seconds": way.seconds(each) if way.bytes_per_second else None,
            "bytes_per_second": each / found.seconds,
        }
        for name, each, way in zip(names, sent, ways, strict=True)
    ]


def _step(
    given: settings.Settings, found: planner.Time, devices: int
) -> dict[str, Any]:
    steps = given.run.agreed.steps
    hours = steps * found.seconds / 3600
    return {
        "seconds": found.seconds,
        "per_second": 1 / found.seconds,
        "tokens_per_second": m3.tokens_per_step(given) / found.seconds,
        "steps": steps,
        "hours": hours,
        "device_hours": hours * devices,
    }


def _busy(found: planner.Time) -> list[dict[str, Any]]:
    """Returns the seconds a step that each part works; of generators, the busiest."""
    most: dict[str, float] = {}
    for name, seconds in found.busy.items():
        kind = name.rstrip("0123456789 ")
        most[kind] = max(most.get(kind, 0.0), seconds)
    return [{"name": name, "busy": seconds} for name, seconds in most.items()]


def _assumptions(given: settings.Settings) -> list[str]:
    found = [
        "Assumed: a cluster's devices share its work evenly; bytes are those of frames,"
        " without TCP's and TLS's own; optimizers, evaluations and checkpoints are left"
        " out."
    ]
    if given.run.agreed.micro_batches > 1:
        found.append("Sequences are packed full.")
    if given.is_shared:
        found.append(f"All clusters share this machine's {os.cpu_count()} cores.")
    return found


def main() -> int:
    """Plans, prints, and writes --out."""
    begin = time.monotonic()
    given = settings.from_flags()
    if not given.tflops:
        process.message(
            "the speed of a device is measured here, for some seconds"
            " (--device_tflops=50,50 gives it)"
        )
    result = plan(given)
    print(plan_text.plan(result), flush=True)
    if given.out:
        record = report.provenance(time.monotonic() - begin) | result
        report.write(pathlib.Path(given.out), record)
    return 0


if __name__ == "__main__":
    shared_flags.run(main, names=settings.flag_names())
