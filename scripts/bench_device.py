"""Measures one accelerator: a training step, determinism.

    python -m scripts.bench_device --tiny              # to try the parts, anywhere
    python -m scripts.bench_device --out=device.json   # at most nine minutes

Each step is a process of its own, one after the other, so that one that fails or takes
too long costs only itself, and the record says so.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from absl import flags

from experiments import shared_flags
from nebula_jax import installed
from nebula_jax.runtime.life import process
from nebula_jax.runtime.records import report
from scripts.bench import harness
from scripts.bench.report import table_of

flags.DEFINE_bool("tiny", False, "A tiny model and few rounds: to try the parts.")
flags.DEFINE_float("seconds", 540.0, "For all parts together.", lower_bound=10)
flags.DEFINE_string("commit", "", "Commit to record, for a copy of the files alone.")

PEAK = {"H100": 989.4, "H200": 989.4}  # dense bfloat16 TFLOP/s, by NVIDIA's data sheet
MFU = 0.35  # asked of the best rung
STEP = "scripts.bench.device_step"
XLA = "--xla_gpu_enable_triton_gemm=false"  # trying out Triton's kernels takes minutes
RUNGS = {  # process -> the rung that it measures, in order; the last two are compared
    **{name: name for name in ("float32", "bfloat16", "fused", "double")},
    "PyTorch": "torch",
    "first": "short",
    "second": "short",
}
TINY = ("fused", "PyTorch", "first", "second")  # of --tiny


def steps(
    rungs: Mapping[str, str], options: Sequence[str], is_gpu: bool, seconds: float
) -> dict[str, dict[str, Any]]:
    """Measures rungs in so many seconds; returns name -> figures, or what `failed`."""
    end, found = time.monotonic() + seconds, {}
    xla = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {XLA}"} if is_gpu else {}
    for name, rung in rungs.items():
        command = [sys.executable, "-m", STEP, *options, rung]
        left = max(0.0, end - time.monotonic())
        found[name] = _figures(command, os.environ | xla, left)
        process.message(f"{name}: {found[name].get('ms', found[name].get('failed'))}")
    return found


def _figures(
    command: Sequence[str], env: Mapping[str, str], seconds: float
) -> dict[str, Any]:
    """Returns the figures that a process prints last, or what it `failed` at."""
    try:
        done = subprocess.run(
            command,
            cwd=installed.FOLDER,
            env=env,
            stdout=subprocess.PIPE,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"not measured in {seconds:.0f} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        return {"failed": f"ended with {done.returncode}"}
    return json.loads(lines[-1])


def _mfu(teraflops: float, kind: str) -> float | None:
    """Returns the share of the device's peak; None if that is not known."""
    peaks = [peak for name, peak in PEAK.items() if name in kind]
    return teraflops / peaks[0] if peaks else None


def targets(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Compares the best rung with what was asked, where the device's peak is known."""
    rates = [
        each["teraflops"]
        for name, each in result["steps"].items()
        if name != "PyTorch" and "ms" in each
    ]
    mfu = _mfu(max(rates), result["device"]) if rates else None
    if mfu is None:
        return []
    return [report.at_least("MFU of the best rung", mfu, MFU)]


COLUMNS = {
    "step": "{about}",
    "batch": "{batch} x {length}",
    "compiled in": "{compile_s:.0f} s",
    "ms": "{ms:.1f}",
    "tokens/s": "{tokens_per_second:,.0f}",
    "TFLOP/s": "{teraflops:.0f}",
    "MFU": "{mfu}",
    "/ PyTorch": "{over}",
    "peak memory": "{memory}",
    "last loss": "{loss:.3f}",
}


def markdown(result: Mapping[str, Any]) -> str:
    """Renders the record."""
    found = result["steps"]
    pytorch = found["PyTorch"] if "ms" in found.get("PyTorch", {}) else None
    rows = [
        _row(step, result["device"], pytorch)
        for name, step in found.items()
        if "ms" in step and RUNGS.get(name) != "short"
    ]
    failed = [
        f"{name} ({each['failed']})" for name, each in found.items() if "failed" in each
    ]
    device = f"one {result['device']}, {result['rounds']} rounds"
    return report.join(
        report.heading(result, device),
        table_of(rows, COLUMNS),
        report.targets(result["targets"]),
        _determinism(found),
        f"Not measured: {'; '.join(failed)}." if failed else "",
    )


def _row(
    step: Mapping[str, Any], device: str, pytorch: Mapping[str, Any] | None
) -> dict[str, Any]:
    mfu, memory = _mfu(step["teraflops"], device), step.get("peak_gib")
    rate = step["tokens_per_second"]
    return {
        **step,
        "mfu": "" if mfu is None else f"{100 * mfu:.1f} %",
        "over": f"{rate / pytorch['tokens_per_second']:.2f}" if pytorch else "",
        "memory": f"{memory:.1f} GiB" if memory else "",
        "loss": step["losses"][-1],
    }


def _determinism(found: Mapping[str, Any]) -> str:
    runs = [found.get(name, {}) for name in ("first", "second")]
    if not all("ms" in each for each in runs):
        return ""
    same = "equal" if runs[0]["digest"] == runs[1]["digest"] else "other"
    times = " and ".join(f"{each['ms']:.1f}" for each in runs)
    return report.join(
        "**Determinism**, four layers.",
        f"- as it is: two runs end with {same} parameters; {times} ms a step.",
    )


def main() -> int:
    """Measures, prints the tables, and writes --out."""
    given = flags.FLAGS
    begin, rounds, tiny = time.monotonic(), given["rounds"].value, given["tiny"].value
    result: dict[str, Any] = {"rounds": rounds}
    rungs = {name: RUNGS[name] for name in TINY} if tiny else RUNGS
    options = [f"--rounds={rounds}", *(["--tiny"] if tiny else [])]
    result["steps"] = steps(rungs, options, not tiny, given["seconds"].value)
    # Asked for at last: whoever asks JAX for a device takes most of its memory.
    result["device"] = jax.devices()[0].device_kind
    result["targets"] = targets(result)
    if given["commit"].value:
        result["commit"] = given["commit"].value
    harness.finish(result, begin, markdown)
    return 0


if __name__ == "__main__":
    shared_flags.run(main, names=["out", "rounds"])
