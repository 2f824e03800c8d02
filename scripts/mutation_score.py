"""Measures the tests: how many small changes of the code they notice.

    pip install -r requirements-mutation.txt
    python -m scripts.mutation_score                           # some hours
    python -m scripts.mutation_score --of=frames,tls --mutants=10

A mutant is a module with one change, such as `<` for `<=`; it is killed if a test fails
or hangs. A seed draws the places. What survives is listed: each is a test that is
missing, or a change that nobody could notice.
"""

import itertools
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from absl import flags

from experiments import shared_flags
from nebula_jax import errors
from nebula_jax.runtime.records import report
from scripts.mutation import mutants, trial

for _name in ("out", "seed"):
    flags.declare_key_flag(_name)
flags.DEFINE_integer("mutants", 30, "Mutants of each module.", lower_bound=1)
flags.DEFINE_integer("workers", 2, "Processes at a time.", lower_bound=1)
flags.DEFINE_list("of", [], "Names of what is changed; all if empty.")

WIRE, CODECS = "nebula_jax/communication/wire", "nebula_jax/communication/codecs"
TRAINING = "nebula_jax/training"
TARGETS: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "frames": (
        [f"{WIRE}/frames.py", f"{WIRE}/reader.py", f"{WIRE}/schema.py"],
        ["tests/communication/wire", "tests/communication/test_bridge.py"],
    ),
    "session": (
        [
            *(f"{WIRE}/session.py", f"{WIRE}/states.py"),
            *(f"{WIRE}/send_window.py", f"{WIRE}/receive_window.py"),
        ],
        ["tests/communication/wire", "tests/communication/test_bridge.py"],
    ),
    "codecs": ([f"{CODECS}/*.py"], ["tests/communication/codecs"]),
    "checkpoint": (
        [f"{TRAINING}/checkpoint*.py", "nebula_jax/runtime/records/checkpoints.py"],
        [
            "tests/training/test_checkpoint.py",
            "tests/training/test_checkpoint_files.py",
            "tests/runtime/records/test_checkpoints.py",
        ],
    ),
    "tls": (
        ["nebula_jax/security/*.py"],
        ["tests/security", "tests/communication/test_bridge.py"],
    ),
}
"""Name -> files that are changed, and their tests; a module's own test runs first."""
TARGET = 0.9  # of the mutants are killed
SLOWER, LEAST_SECONDS = 3.0, 20.0  # than the unchanged code: then the tests hang
LONGEST_SECONDS = 3600.0  # of the unchanged code's tests


def tests_of(module: str, tests: Sequence[str]) -> list[str]:
    """Returns the tests for a module, its own first: most mutants end there."""
    folder, _, name = (
        module.removeprefix("nebula_jax.").replace(".", "/").rpartition("/")
    )
    own = f"tests/{folder}/test_{name}.py"
    return [own, *tests] if (trial.ROOT / own).is_file() else list(tests)


def run(
    trials: Sequence[trial.Trial], folder: pathlib.Path, workers: int
) -> Iterator[trial.Result]:
    """Runs trials in a process that has imported nothing of the project."""
    given = folder / "trials.json"
    given.write_text(json.dumps(trials))
    module = "scripts.mutation.trial"
    command = [sys.executable, "-m", module, str(given), str(folder), str(workers)]
    with subprocess.Popen(
        command, cwd=trial.ROOT, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        for line in server.stdout:
            number, outcome, seconds = json.loads(line)
            yield trial.Result(number, trial.Outcome[outcome], seconds)
    if server.returncode:
        raise errors.NebulaError(f"{module} ended with status {server.returncode}")


def baseline(tests: Sequence[str], folder: pathlib.Path) -> float:
    """Returns the seconds that tests take on the unchanged code.

    Raises:
      errors.NebulaError: if they fail there.
    """
    unchanged = trial.Trial("", "", tests, LONGEST_SECONDS)
    [result] = run([unchanged], folder, workers=1)
    if result.outcome is not trial.Outcome.SURVIVED:
        printed = (folder / "worker0.log").read_text(errors="replace")
        raise errors.NebulaError(
            f"{' '.join(tests)}: fail on the unchanged code\n{printed[-2000:]}"
        )
    return result.seconds


def score(
    name: str, seed: int, count: int, workers: int, folder: pathlib.Path
) -> dict[str, Any]:
    """Tries mutants of a target.

    Args:
      name: in TARGETS.
      seed: of the draw.
      count: mutants of each module, if it has so many places.
      workers: processes at a time.
      folder: for what tests print.

    Returns:
      name, mutants, survivors: one entry of a record.
    """
    patterns, tests = TARGETS[name]
    limit = max(LEAST_SECONDS, SLOWER * workers * baseline(tests, folder))
    drawn = {each: mutants.draw(each, seed) for each in mutants.modules(patterns)}
    missing = dict.fromkeys(drawn, count)
    tried: list[dict[str, Any]] = []
    # Some cannot be imported; others are drawn for them.
    while batch := [
        mutant
        for module in drawn
        for mutant in itertools.islice(drawn[module], missing[module])
    ]:
        trials = [
            trial.Trial(
                each.module,
                mutants.mutated(each),
                tests_of(each.module, tests),
                limit,
            )
            for each in batch
        ]
        for result in run(trials, folder, workers):
            mutant, outcome = batch[result.number], result.outcome
            print(
                f"{outcome.name:<8} {result.seconds:5.1f} s  {mutant.name}", flush=True
            )
            if outcome is not trial.Outcome.BROKEN:
                missing[mutant.module] -= 1
                tried.append({**mutant._asdict(), "outcome": outcome.name})
    survivors = [each for each in tried if each.pop("outcome") == "SURVIVED"]
    survivors.sort(key=lambda each: (each["module"], each["line"], each["operator"]))
    return {"name": name, "mutants": len(tried), "survivors": survivors}


def markdown(result: Mapping[str, Any]) -> str:
    """Renders the record."""
    rows, left = [], []
    for each in result["targets"]:
        survivors = each["survivors"]
        killed = each["mutants"] - len(survivors)
        share = killed / each["mutants"]
        met = report.VERDICTS[share >= TARGET]
        rows.append(
            [each["name"], str(each["mutants"]), str(killed), f"{share:.1%}", met]
        )
        left += [
            f"- `{one['module'].removeprefix('nebula_jax.')}:{one['line']}`"
            f" {one['operator']}"
            for one in survivors
        ]
    about = f"seed {result['seed']}, {result['count']} mutants of each module at most"
    return report.join(
        report.heading(result, about),
        report.table(
            ["code", "mutants", "killed", "share", f"at least {TARGET:.0%}"], rows
        ),
        "Survivors:",
        "\n".join(left),
    )


def main() -> int:
    """Prints the table; with --out, writes the record."""
    values = flags.FLAGS
    names = values.of or list(TARGETS)
    if unknown := sorted(set(names) - set(TARGETS)):
        raise errors.SettingsError(
            f"--of={','.join(unknown)}: expected some of {', '.join(TARGETS)}"
        )
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder)
        found = [
            score(name, values.seed, values.mutants, values.workers, path)
            for name in names
        ]
    result = {
        **report.provenance(time.monotonic() - begin),
        "seed": values.seed,
        "count": values.mutants,
        "targets": found,
    }
    print(markdown(result))
    if values.out:
        report.write(pathlib.Path(values.out), result)
    return 0


if __name__ == "__main__":
    shared_flags.run(main)
