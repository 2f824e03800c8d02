"""Measures one accelerator: a training step, determinism.

    python -m scripts.bench_device --tiny              # to try the parts, anywhere
    python -m scripts.bench_device --out=device.json   # at most nine minutes

Each step is a process of its own, so that one that fails or takes too long costs only
itself, and the record says so. They compile together, which
takes minutes, and are measured one after the other.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
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

DEFAULTS = {"rounds": 5}
"""Shared flags that have another default in this benchmark."""
flags.DEFINE_bool("tiny", False, "A tiny model and few rounds: to try the parts.")
flags.DEFINE_float("seconds", 540.0, "For all parts together.", lower_bound=10)
flags.DEFINE_string("commit", "", "Commit to record, for a copy of the files alone.")

PEAK = {"H100": 989.4, "H200": 989.4}
"""Tera operations a second of bfloat16 products, dense, as NVIDIA's data sheets say."""
MFU = 0.35  # asked of the best rung
STEP = "scripts.bench.device_step"
XLA = "--xla_gpu_enable_triton_gemm=false"
"""Triton's kernels for matrix products take minutes to be tried out."""

RUNGS = {
    **{name: name for name in ("float32", "bfloat16", "fused", "double")},
    "PyTorch": "torch",
    "first": "short",
    "second": "short",
}
"""Process -> the rung that it measures, in this order; two are there to be compared."""
TINY = ("fused", "PyTorch", "first", "second")  # of --tiny


class Child:
    """The process of a rung, and the lines that it has printed."""

    def __init__(self, rung: str, options: Sequence[str], is_gpu: bool) -> None:
        xla = f"{os.environ.get('XLA_FLAGS', '')} {XLA if is_gpu else ''}".strip()
        # Several are on the device at once.
        env = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | (
            {"XLA_FLAGS": xla} if xla else {}
        )
        self.process = subprocess.Popen(
            [sys.executable, "-m", STEP, *options, rung],
            cwd=installed.FOLDER,
            env=os.environ | env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.found: dict[str, Any] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None  # it is a pipe
        for line in self.process.stdout:
            if line.startswith("{"):
                self.found |= json.loads(line)

    def is_compiling(self) -> bool:
        """Returns True if it has neither compiled nor ended."""
        return not self.found and self.process.poll() is None

    def measure(self, seconds: float) -> dict[str, Any]:
        """Lets it measure; returns its figures, or what it `failed` at."""
        if self.process.poll() is None and not self.found:
            self.process.kill()
            self.found["failed"] = "not compiled in time"
        elif "failed" not in self.found:
            assert self.process.stdin is not None  # it is a pipe
            with contextlib.suppress(BrokenPipeError):  # it has ended
                self.process.stdin.write("go\n")
                self.process.stdin.close()
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                self.found["failed"] = f"not measured in {seconds:.0f} s"
            self.process.kill()
        self.process.wait()
        self._reader.join(10)  # seconds; a child of its own may hold the pipe open
        if "ms" not in self.found:
            self.found.setdefault("failed", f"ended with {self.process.returncode}")
        return self.found


def steps(
    rungs: Mapping[str, str],
    options: Sequence[str],
    is_gpu: bool,
    compiling: float,
    measuring: float,
) -> dict[str, dict[str, Any]]:
    """Compiles rungs together, then measures them one by one.

    Args:
      rungs: as RUNGS.
      options: of each process.
      is_gpu: False to leave out the flags of a GPU's compiler.
      compiling: seconds for all, together.
      measuring: seconds for each.

    Returns:
      Name -> figures, or what `failed`.
    """
    end = time.monotonic() + compiling
    children = {}
    try:
        for name, rung in rungs.items():
            children[name] = Child(rung, options, is_gpu)
        while time.monotonic() < end:
            if not any(child.is_compiling() for child in children.values()):
                break
            time.sleep(0.2)
        found = {}
        for name, child in children.items():
            found[name] = child.measure(measuring)
            process.message(
                f"{name}: {found[name].get('ms', found[name].get('failed'))}"
            )
        return found
    finally:
        for child in children.values():
            child.process.kill()


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
    """Returns the cells of a step."""
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
    process.message(f"steps: compiling {len(rungs)} of them")
    options = [f"--rounds={rounds}", *(["--tiny"] if tiny else [])]
    measuring = 15.0  # seconds a rung, with its end
    compiling = max(60.0, given["seconds"].value - 10 - measuring * len(rungs))
    result["steps"] = steps(rungs, options, not tiny, compiling, measuring)
    # Asked for at last: whoever asks JAX for a device takes most of its memory.
    result["device"] = jax.devices()[0].device_kind
    result["targets"] = targets(result)
    if given["commit"].value:
        result["commit"] = given["commit"].value
    harness.finish(result, begin, markdown)
    return 0


if __name__ == "__main__":
    shared_flags.run(
        main, DEFAULTS, names=["out", "rounds", "tiny", "seconds", "commit"]
    )
