"""Measures one accelerator: a training step, codecs, local steps, determinism.

    python -m scripts.bench_device --tiny              # to try the parts, anywhere
    python -m scripts.bench_device --out=device.json   # at most nine minutes

Each part is a process of its own with its own flags of XLA, so that one that fails or
takes too long costs only itself: parts for which no time is left are left out, and the
record says so.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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
flags.DEFINE_string("commit", "", "Of a copy of this checkout that has no repository.")

PEAK = {"H100": 989.4, "H200": 989.4}
"""Tera operations a second of bfloat16 products, dense, as NVIDIA's data sheets say."""
MFU = 0.35  # asked of the best rung
STEP = "scripts.bench.device_step"
FTZ = "--xla_backend_extra_options=-nvptx-allow-ftz-atomics"
DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
LOCAL_STEPS = "experiments.local_steps_your_model"
ROUNDS, INNER_STEPS = 10, 20


class Part(NamedTuple):
    """A process: what it measures, what it runs, how long it may take."""

    name: str
    arguments: Sequence[str]
    seconds: float
    xla: str = ""


def parts(tiny: bool, rounds: int) -> list[Part]:
    """Returns the parts that are rungs, the most telling first."""
    more = [f"--rounds={rounds}", *(["--tiny"] if tiny else [])]

    def of(name: str, rungs: str, seconds: float, xla: str = "") -> Part:
        return Part(name, [STEP, *more, *rungs.split()], seconds, xla)

    on_any = [
        of("ladder", "float32 bfloat16 masked cudnn stored double", 300),
        of("pytorch", "torch", 120),
        of("determinism", "short short", 90),
    ]
    if tiny:  # the flags are of a GPU's compiler
        return on_any
    return [
        *on_any,
        of("deterministic", "short short", 90, DETERMINISTIC),
        of("ftz", "stored", 100, FTZ),
    ]


def run(part: Part, seconds: float) -> list[dict[str, Any]]:
    """Runs a part for at most so long; returns its lines, and why it ended early."""
    flags_of_xla = f"{os.environ.get('XLA_FLAGS', '')} {part.xla}".strip()
    child = subprocess.Popen(
        [sys.executable, "-m", *part.arguments],
        cwd=installed.FOLDER,
        env=os.environ | ({"XLA_FLAGS": flags_of_xla} if flags_of_xla else {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    late = False
    try:
        printed, _ = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        child.kill()
        late, (printed, _) = True, child.communicate()
    lines = [json.loads(each) for each in printed.splitlines() if each[:1] == "{"]
    if late:
        lines.append({"failed": f"not done after {seconds:.0f} s"})
    elif child.returncode:
        lines.append({"failed": f"status {child.returncode}; see its own error"})
    return lines


def codecs(rounds: int, seconds: float) -> dict[str, Any]:
    """Measures codecs by `bench_codecs`; returns its record, or why there is none."""
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/codecs.json"
        arguments = ["scripts.bench_codecs", f"--rounds={rounds}", f"--out={out}"]
        failed = run(Part("codecs", arguments, seconds), seconds)
        if failed or not os.path.exists(out):
            return {"failed": failed}
        with open(out) as file:
            return json.load(file)


def local_steps(seconds: float) -> dict[str, Any]:
    """Trains a replica on the accelerator and one on the cores, by local steps.

    Each message has the digest of its sender's anchors, and one that differs ends both
    with an error: two that end well had equal anchors in every round.
    """
    steps = ROUNDS * INNER_STEPS
    with tempfile.TemporaryDirectory() as folder:
        address = f"127.0.0.1:{harness.free_port()}"
        shared = [
            *(sys.executable, "-m", LOCAL_STEPS, "--clusters=2", "--tls=off"),
            *(f"--steps={steps}", f"--inner_steps={INNER_STEPS}"),
        ]
        began, children = time.monotonic(), []
        for number, door in enumerate((f"--listen={address}", f"--peer={address}")):
            here = [f"--cluster=replica:{number}", door, f"--workdir={folder}/{number}"]
            env = dict(os.environ)
            if number:
                env["JAX_PLATFORMS"] = "cpu"
            children.append(
                subprocess.Popen(
                    [*shared, *here],
                    cwd=installed.FOLDER,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        ends = []
        for child in children:
            try:
                left = max(1.0, began + seconds - time.monotonic())
                printed, _ = child.communicate(timeout=left)
            except subprocess.TimeoutExpired:
                child.kill()
                printed, _ = child.communicate()
            ends.append({"status": child.returncode, "last": printed[-500:]})
    return {"rounds": ROUNDS, "inner_steps": INNER_STEPS, "ends": ends}


def _mfu(teraflops: float, kind: str) -> float | None:
    """Returns the share of the device's peak; None if that is not known."""
    peaks = [peak for name, peak in PEAK.items() if name in kind]
    return teraflops / peaks[0] if peaks else None


def targets(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Compares the best rung with what was asked, where the device's peak is known."""
    rungs = [each for each in result["parts"].get("ladder", []) if "ms" in each]
    if not rungs:
        return []
    best = max(rungs, key=lambda each: each["teraflops"])
    mfu = _mfu(best["teraflops"], result["device"])
    if mfu is None:
        return []
    return [harness.at_least("MFU of the best rung", mfu, MFU)]


RUNG = {
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
CODEC = {
    "codec": "`{codec}`",
    "encodes, GB/s": "{encode:.0f}",
    "decodes, GB/s": "{decode:.0f}",
    "encoding / copy": "{encode_over_copy:.2f}",
}


def markdown(result: Mapping[str, Any]) -> str:
    """Renders the record."""
    found = result["parts"]
    rungs = {
        name: [each for each in found.get(name, []) if "ms" in each]
        for name in ("ladder", "pytorch", "ftz")
    }
    missing = [
        f"{name}: {each['failed']}"
        for name, lines in found.items()
        if isinstance(lines, list)
        for each in lines
        if "failed" in each
    ]
    pytorch = rungs["pytorch"][0] if rungs["pytorch"] else None
    rows = [
        _row(each, result["device"], pytorch, f", `{FTZ}`" if name == "ftz" else "")
        for name, lines in rungs.items()
        for each in lines
    ]
    device = f"one {result['device']}, {result['rounds']} rounds"
    return report.join(
        report.heading(result, device),
        table_of(rows, RUNG),
        report.targets(result["targets"]),
        _determinism(found),
        _codecs(found.get("codecs", {})),
        _local_steps(found.get("local_steps", {})),
        f"Not measured: {'; '.join(missing)}." if missing else "",
    )


def _row(
    step: Mapping[str, Any], device: str, pytorch: Mapping[str, Any] | None, more: str
) -> dict[str, Any]:
    """Returns the cells of a step."""
    mfu, memory = _mfu(step["teraflops"], device), step.get("peak_gib")
    rate = step["tokens_per_second"]
    return {
        **step,
        "about": step["about"] + more,
        "mfu": "" if mfu is None else f"{100 * mfu:.1f} %",
        "over": f"{rate / pytorch['tokens_per_second']:.2f}" if pytorch else "",
        "memory": f"{memory:.1f} GiB" if memory else "",
        "loss": step["losses"][-1],
    }


def _determinism(found: Mapping[str, Any]) -> str:
    lines = []
    for name, about in (("determinism", "as it is"), ("deterministic", DETERMINISTIC)):
        runs = [each for each in found.get(name, []) if "ms" in each]
        if len(runs) == 2:
            same = "equal" if runs[0]["digest"] == runs[1]["digest"] else "other"
            times = " and ".join(f"{each['ms']:.1f}" for each in runs)
            lines.append(
                f"- {about}: two runs end with {same} parameters, {times} ms a step."
            )
    return "\n".join(["**Determinism**, four layers.", "", *lines]) if lines else ""


def _codecs(record: Mapping[str, Any]) -> str:
    if "codecs" not in record:
        return ""
    size = 4.0
    for each in record["shape"]:
        size *= each
    rows = [
        each
        | {
            "encode": size / each["encode_ms"] / 1e6,
            "decode": size / each["decode_ms"] / 1e6,
        }
        for each in record["codecs"]
    ]
    copied = size / record["copy_ms"]["copy"] / 1e6
    about = f"**Codecs**, GB/s of the float32 tensor; a copy has {copied:.0f}."
    return report.join(about, table_of(rows, CODEC))


def _local_steps(record: Mapping[str, Any]) -> str:
    if not record:
        return ""
    if any(each["status"] for each in record["ends"]):
        last = record["ends"][0]["last"].strip().splitlines()[-1:]
        return f"**Local steps** of the accelerator and the cores: failed, {last}."
    return (
        f"**Local steps** of a replica on the accelerator and one on the cores:"
        f" {record['rounds']} rounds of {record['inner_steps']} steps, the digests of"
        " the anchors equal in each."
    )


def main() -> int:
    """Measures, prints the tables, and writes --out."""
    given = flags.FLAGS
    begin, rounds = time.monotonic(), given["rounds"].value
    end = begin + given["seconds"].value

    def left(most: float) -> float:
        return min(most, end - time.monotonic() - 10)

    found: dict[str, Any] = {}
    for part in parts(given["tiny"].value, rounds):
        process.message(f"{part.name}: {' '.join(part.arguments)} {part.xla}")
        if left(part.seconds) > 5:
            found[part.name] = run(part, left(part.seconds))
        else:
            found[part.name] = [{"failed": "no time was left"}]
    if left(60) > 20:
        process.message("local steps: one replica here, one on the cores")
        found["local_steps"] = local_steps(left(60))
    if not given["tiny"].value and left(90) > 20:
        process.message("codecs")
        found["codecs"] = codecs(3, left(90))
    # Asked for at last: whoever asks JAX for a device takes most of its memory.
    result = {"rounds": rounds, "device": jax.devices()[0].device_kind, "parts": found}
    result |= {"targets": targets(result)}
    if given["commit"].value:
        result["commit"] = given["commit"].value
    harness.finish(result, begin, markdown)
    return 0


if __name__ == "__main__":
    shared_flags.run(
        main, DEFAULTS, names=["out", "rounds", "tiny", "seconds", "commit"]
    )
