"""Compares codecs that a run chooses by itself with fixed ones, on four lines.

    python -m scripts.table_codec_control --data_dir=../shared/data

The runs are those of Table 5 at its tiny scale. On each line of a fixed rate every
codec of the ladder is measured by a short run of two clusters, then `auto` by a whole
run. The fourth line changes its rate in mid-run. Loss and BLEU of held-out pairs after
`auto` are compared with those after the codec that is the fastest in hindsight, seed by
seed; that one is trained with `--cluster=whole`, where the numbers are the same. The
paper's lines are slowed by as much as this machine computes slower
(`experiments/abnet/scaled_wan.py`). Runs are done once, one after the other; after a
stop, the same command goes on.
"""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from absl import flags

from experiments import shared_flags
from experiments.abnet import crossing, scaled_wan
from nebula_jax import errors
from nebula_jax.runtime import report, run_folder
from scripts.tables import abnet as abnet_runs
from scripts.tables import codec_control_markdown, config, held_out
from scripts.tables import runs as table_runs

for _name in (*config.FLAGS, "stages"):
    if _name != "scale":
        flags.declare_key_flag(_name)

STAGES = ("speed", "quality")
"""Runs over lines, which need an idle machine; fixed codecs in one process."""

FLAGFILE = "abnet_table5_tiny"
CODECS = {
    name: (f"--forward_codec={text}", f"--backward_codec={text}")
    for name, text in zip(("fp16", "int8", "int4"), crossing.LADDER, strict=True)
}
"""Name -> flags of the rungs of the ladder, the gentlest first."""
EVERY = 40  # steps between two probes
AUTO = (
    *("--forward_codec=auto", "--backward_codec=auto", "--quality=0.98"),
    f"--probe_every={EVERY}",
)
PAPER = 60.0  # Mbit/s, for which scaled_wan gives this machine's line
CHANGES_AFTER = 35  # seconds after the first byte
SETTLED_STEPS = 40  # of a segment, at most: its last ones
LIMITS = {"over_best": 1.05, "probes": 0.02}


class Line(NamedTuple):
    """A line of the table."""

    name: str
    key: str
    """In the names of files."""
    rates: tuple[float, ...]
    """Mbit/s; the second from CHANGES_AFTER on."""


LINES = (
    Line("10 Mbit/s", "10", (10.0,)),
    Line("60 Mbit/s", "60", (60.0,)),
    Line("1000 Mbit/s", "1000", (1000.0,)),
    Line("1000, then 60 Mbit/s", "1000-60", (1000.0, 60.0)),
)


FIRST = "int4", LINES[1]
"""The run that measures a step's computation, from which all lines follow."""


def wan(line: Line, measured: Mapping[str, Any]) -> str:
    """Returns a line for --wan.

    Args:
      line: of the table.
      measured: this machine's, from `scaled_wan.read`.
    """
    first, *later = [measured["rate"] * rate / PAPER / 1e3 for rate in line.rates]
    parts = [f"{first:.0f}kbit", f"{1e3 * measured['delay']:.2f}ms"]
    return ",".join(parts + [f"{rate:.0f}kbit@{CHANGES_AFTER}s" for rate in later])


def fixed_run(
    codec: str, line: Line, measured: Mapping[str, Any], base: Sequence[str]
) -> table_runs.Run:
    """Describes the run that measures a codec's time and bytes on a line."""
    text = wan(line, measured) if measured else scaled_wan.AUTO
    return abnet_runs.short_run(f"{codec}-{line.key}", CODECS[codec], text, base)


def quality_run(codec: str, seed: str, base: Sequence[str]) -> table_runs.Run:
    """Describes the run that measures loss and BLEU with a codec."""
    flags_of_run = (*base, "--cluster=whole", f"--seed={seed}", *CODECS[codec])
    return abnet_runs.run(f"quality-{codec}-seed{seed}", flags_of_run, f"seed{seed}")


def auto_run(
    line: Line, seed: str, measured: Mapping[str, Any], base: Sequence[str]
) -> table_runs.Run:
    """Describes the run that chooses its codecs on a line."""
    where = "--cluster=all", f"--wan={wan(line, measured)}", f"--seed={seed}"
    flags_of_run = (*base, *where, "--log_every=1", *AUTO)
    return abnet_runs.run(f"auto-{line.key}-seed{seed}", flags_of_run, f"seed{seed}")


class Step(NamedTuple):
    """A step of a run that chooses."""

    number: int
    seconds: float
    rungs: tuple[int, int]
    is_probed: bool


def steps_of(result: Mapping[str, Any]) -> tuple[list[Step], int | None]:
    """Reads the steps of a run that chooses, but for the first one.

    Args:
      result: figures of the run.

    Returns:
      The steps, and the last probed one before the line changed, which is before two
      probes in a row found that steps wait for it. None if it did not change.
    """
    clusters = result["summary"]["clusters"]
    tape = next(each["tape"] for each in clusters if "tape" in each)
    probed = [int(row[0]) for row in tape]
    times = {each["step"]: each["time"] for each in result["records"]}
    found = []
    for before, number in itertools.pairwise(sorted(times)):
        after = min(sum(step < number for step in probed), len(tape) - 1)
        rungs = int(tape[after][1]), int(tape[after][2])
        seconds = times[number] - times[before]
        found.append(Step(number, seconds, rungs, number in probed))
    waits = [row[5] > 1 for row in tape]
    turns = zip(probed, waits, waits[1:], waits[2:], strict=False)
    changes = [step for step, *three in turns if three == [False, True, True]]
    return found, changes[0] if changes else None


def settled(steps: Sequence[Step]) -> dict[str, Any]:
    """Returns what a segment of a run settles on.

    Args:
      steps: of the segment.

    Returns:
      rungs: of the last step. from_step: since when. seconds: the median of the last
      steps with these rungs that are not probed. probes: seconds that probes add, over
      all seconds of these steps.
    """
    rungs = steps[-1].rungs
    same = list(itertools.takewhile(lambda step: step.rungs == rungs, steps[::-1]))
    last = same[:SETTLED_STEPS]
    seconds = statistics.median(step.seconds for step in last if not step.is_probed)
    return {
        "rungs": list(rungs),
        "from_step": same[-1].number,
        "seconds": seconds,
        "probes": _added(last, seconds) / sum(step.seconds for step in last),
    }


def _added(steps: Sequence[Step], seconds: float) -> float:
    return sum(step.seconds - seconds for step in steps if step.is_probed)


def gather(
    runs: table_runs.Runs, base: Sequence[str], seeds: Sequence[str]
) -> dict[str, Any]:
    """Gathers the figures of the runs that have ended."""
    commits: set[str] = set()
    total = 0.0

    def read(run: table_runs.Run) -> dict[str, Any] | None:
        nonlocal total
        result = runs.found(run)
        if result is not None:
            commits.add(result["summary"]["commit"])
            total += result["summary"]["seconds"]
            if any(each["first_step"] != 1 for each in result["summary"]["clusters"]):
                raise errors.NebulaError(
                    f"{run.name} was stopped in between, so its seconds are not those"
                    f" of one run; remove {runs.path(run.name)}, and it is done again"
                )
        return result

    quality = {}
    for codec in CODECS:
        found = {seed: read(quality_run(codec, seed, base)) for seed in seeds}
        quality[codec] = held_out.by_seed(
            {seed: result for seed, result in found.items() if result is not None}
        )
    first = read(fixed_run(*FIRST, {}, base))
    measured = first["summary"]["line"] if first else {}
    fixed: dict[float, dict[str, float]] = {}
    rows, curves = [], []
    for line in LINES if measured else ():
        speeds: dict[str, float] = {}
        for codec in CODECS if not line.rates[1:] else ():
            given = {} if (codec, line) == FIRST else measured
            speed = read(fixed_run(codec, line, given, base))
            if speed is not None:
                speeds[codec] = abnet_runs.speed_of(speed)["seconds"]
        fixed |= {rate: speeds for rate in line.rates if speeds}
        runs_of_line = {
            seed: result
            for seed in seeds
            if (result := read(auto_run(line, seed, measured, base))) is not None
        }
        if runs_of_line and all(rate in fixed for rate in line.rates):
            rows += _rows(line, runs_of_line, fixed, quality)
            steps, _ = steps_of(next(iter(runs_of_line.values())))
            points = [[each.number, each.seconds, *each.rungs] for each in steps]
            curves.append({"line": line.name, "steps": points})
    return {
        **report.provenance(total, commits=sorted(commits), seeds=seeds),
        "every": EVERY,
        "ladder": list(CODECS),
        "line": measured,
        "rows": rows,
        "curves": curves,
        "targets": targets(rows),
    }


def _rows(
    line: Line,
    results: Mapping[str, Mapping[str, Any]],
    fixed: Mapping[float, Mapping[str, float]],
    quality: Mapping[str, held_out.BySeed],
) -> list[dict[str, Any]]:
    """Returns the rows of a line, one for each of its rates."""
    rows: list[dict[str, Any]] = [
        {"line": line.name, "rate": rate, "fixed": fixed[rate], "seeds": {}}
        for rate in line.rates
    ]
    for seed, result in results.items():
        steps, change = steps_of(result)
        parts = [steps]
        if line.rates[1:]:
            if change is None:
                raise errors.NebulaError(
                    f"auto-{line.key}-seed{seed}: the line did not change in the run"
                )
            parts = [
                [step for step in steps if step.number <= change],
                [step for step in steps if step.number > change],
            ]
        for row, part in zip(rows, parts, strict=True):
            found = settled(part)
            before = [step for step in part if step.number < found["from_step"]]
            row["seeds"][seed] = found | {
                "first_step": part[0].number,
                "seeking": sum(step.seconds for step in before)
                - len(before) * found["seconds"],
            }
    for row in rows:
        row["best"] = min(row["fixed"], key=row["fixed"].__getitem__)
    # What is compared is the whole run, with what is best on its last rate.
    scores = held_out.by_seed(results)
    rows[-1] |= held_out.compare(scores, quality[rows[-1]["best"]])
    return rows


def targets(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Compares what was measured with the targets."""
    found = []
    for row in rows:
        where = codec_control_markdown.label(row)
        seconds = statistics.fmean(each["seconds"] for each in row["seeds"].values())
        over = seconds / row["fixed"][row["best"]]
        probes = statistics.fmean(each["probes"] for each in row["seeds"].values())
        for what, value, limit in (
            (f"s/step over the best fixed codec's ({where})", over, "over_best"),
            (f"share of probes in settled steps ({where})", probes, "probes"),
        ):
            met = value <= LIMITS[limit]
            found.append(
                {"what": what, "value": value, "at_most": LIMITS[limit], "met": met}
            )
    return found


def work(
    runs: table_runs.Runs,
    base: Sequence[str],
    seeds: Sequence[str],
    stages: Sequence[str],
) -> None:
    """Does the runs that have not been done."""
    if "speed" in stages:
        measured = runs.result(fixed_run(*FIRST, {}, base))["summary"]["line"]
        for line in LINES:
            for codec in CODECS if not line.rates[1:] else ():
                if (codec, line) != FIRST:
                    runs.result(fixed_run(codec, line, measured, base))
        for seed, line in itertools.product(seeds, LINES):
            runs.result(auto_run(line, seed, measured, base))
    if "quality" in stages:
        for seed, codec in itertools.product(seeds, CODECS):
            runs.result(quality_run(codec, seed, base))


def main() -> int:
    """Does the missing runs; writes the table, and prints it."""
    table = config.from_flags("codec_control", (), abnet_runs.SEEDS)
    base = table.arguments(table_runs.flagfile(FLAGFILE))
    with run_folder.lock(table.workdir):
        runs = table_runs.Runs(table.workdir, abnet_runs.figures, results=table.results)
        work(runs, base, table.seeds, config.stages(STAGES))
        result = gather(runs, base, table.seeds)
    table_runs.write(result, codec_control_markdown.markdown(result), table.out)
    codec_control_markdown.picture(result, table.out.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    shared_flags.run(main)
