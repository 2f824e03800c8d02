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

import functools
import itertools
import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from experiments import shared_flags
from experiments.abnet import config as abnet_config
from experiments.abnet import scaled_wan
from nebula_jax import errors
from nebula_jax.runtime.records import report
from scripts.tables import abnet as abnet_runs
from scripts.tables import config, held_out, pictures, sweep
from scripts.tables import runs as table_runs

STAGES = ("speed", "quality")
"""Runs over lines, which need an idle machine; then, in one process, those codecs that
were the fastest."""

FLAGFILE = "abnet_table5_tiny"
CODECS = {
    name: (f"--forward_codec={text}", f"--backward_codec={text}")
    for name, text in zip(("bf16", "int8", "int4"), abnet_config.LADDER, strict=True)
}
"""Name -> flags of the rungs of the ladder, the gentlest first."""
EVERY = 50  # steps between two probes
AUTO = (
    *("--forward_codec=auto", "--backward_codec=auto", "--quality=0.98"),
    f"--probe_every={EVERY}",
)
PAPER = 60.0  # Mbit/s, for which scaled_wan gives this machine's line
CHANGES_AFTER = 65  # seconds after the first byte
LONGER = 320  # steps on a line that changes, so that a run settles before and after it
SETTLED_STEPS = EVERY
"""The last steps of a segment, which count as settled: as many as hold one probe."""
LIMITS = {"over_best": 1.05, "probes": 0.02}


class Line(NamedTuple):
    """A line of the table."""

    name: str
    key: str
    """In the names of files."""
    rates: tuple[float, ...]
    """Mbit/s; the second from CHANGES_AFTER on."""

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags of whole runs on this line, beside those of all."""
        return (f"--steps={LONGER}",) if self.rates[1:] else ()


LINES = (
    Line("10 Mbit/s", "10", (10.0,)),
    Line("60 Mbit/s", "60", (60.0,)),
    Line("1000 Mbit/s", "1000", (1000.0,)),
    Line("1000, then 60 Mbit/s", "1000-60", (1000.0, 60.0)),
)


FIRST = "int4", LINES[1]
"""The run that measures a step's computation, from which all lines follow."""


def wan(line: Line, measured: Mapping[str, Any]) -> str:
    """Returns a line for --wan, from this machine's (`scaled_wan.read`)."""
    first, *later = [measured["rate"] * rate / PAPER / 1e3 for rate in line.rates]
    parts = [f"{first:.0f}kbit", f"{1e3 * measured['delay']:.2f}ms"]
    return ",".join(parts + [f"{rate:.0f}kbit@{CHANGES_AFTER}s" for rate in later])


def fixed_run(
    codec: str, line: Line, measured: Mapping[str, Any], base: Sequence[str]
) -> table_runs.Run:
    """Describes the run that measures a codec's time and bytes on a line."""
    text = wan(line, measured) if measured else scaled_wan.AUTO
    return abnet_runs.short_run(f"{codec}-{line.key}", CODECS[codec], text, base)


def quality_run(
    codec: str, line: Line, base: Sequence[str], seed: str
) -> table_runs.Run:
    """Describes the run that measures loss and BLEU with a codec.

    It is the same for all lines on which runs have as many steps.
    """
    where = "--cluster=whole", f"--seed={seed}"
    longer = "-longer" if line.flags else ""
    return abnet_runs.run(
        f"quality-{codec}{longer}-seed{seed}",
        (*base, *where, *CODECS[codec], *line.flags),
        f"seed{seed}",
    )


def auto_run(
    line: Line, measured: Mapping[str, Any], base: Sequence[str], seed: str
) -> table_runs.Run:
    """Describes the run that chooses its codecs on a line."""
    where = "--cluster=all", f"--wan={wan(line, measured)}", f"--seed={seed}"
    flags_of_run = (*base, *where, "--log_every=1", *AUTO, *line.flags)
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
    cluster = next(each for each in clusters if "tape" in each)
    tape = cluster["tape"]
    probed = [int(row[0]) for row in tape]
    in_use = [(int(forward), int(backward)) for _, forward, backward, *_ in tape]
    in_use.append(tuple(cluster.get("rungs", in_use[-1])))
    times = {each["step"]: each["time"] for each in result["records"]}
    found = []
    for before, number in itertools.pairwise(sorted(times)):
        rungs = in_use[sum(step < number for step in probed)]
        seconds = times[number] - times[before]
        found.append(Step(number, seconds, rungs, number in probed))
    waits = [row[5] > 1 for row in tape]
    turns = zip(probed, waits, waits[1:], waits[2:], strict=False)
    changes = [step for step, *three in turns if three == [False, True, True]]
    return found, changes[0] if changes else None


def settled(steps: Sequence[Step]) -> dict[str, Any]:
    """Returns what the steps of a segment of a run settle on.

    Returns:
      rungs: of the last step. from_step: since when. seconds: the median of the last
      steps with these rungs that are not probed. probes: seconds that probes add, over
      all seconds of these steps.
    """
    rungs = steps[-1].rungs
    same = list(itertools.takewhile(lambda step: step.rungs == rungs, steps[::-1]))
    last = same[:SETTLED_STEPS]
    seconds = statistics.median(step.seconds for step in last if not step.is_probed)
    added = sum(step.seconds - seconds for step in last if step.is_probed)
    return {
        "rungs": list(rungs),
        "from_step": same[-1].number,
        "seconds": seconds,
        "probes": added / sum(step.seconds for step in last),
    }


def gather(
    runs: table_runs.Runs, base: Sequence[str], seeds: Sequence[str]
) -> dict[str, Any]:
    """Gathers the figures of the runs that have ended."""
    measured, fixed = speeds(functools.partial(_found, runs), base)
    rows, curves = [], []
    for line in LINES if measured else ():
        chose = {}
        for seed in seeds:
            result = _found(runs, auto_run(line, measured, base, seed))
            if result is not None:
                chose[seed] = result
        if chose and all(rate in fixed for rate in line.rates):
            best = fastest(fixed[line.rates[-1]])
            beside = runs.of_seeds(
                functools.partial(quality_run, best, line, base), seeds
            )
            rows += _rows(line, chose, fixed, held_out.by_seed(beside))
            steps, _ = steps_of(next(iter(chose.values())))
            points = [[each.number, each.seconds, *each.rungs] for each in steps]
            curves.append({"line": line.name, "steps": points})
    return {
        "every": EVERY,
        "ladder": list(CODECS),
        "line": measured,
        "rows": rows,
        "curves": curves,
        "targets": targets(rows),
    }


def _found(runs: table_runs.Runs, run: table_runs.Run) -> dict[str, Any] | None:
    """Returns the figures of a timed run, which has to have ended without a stop."""
    result = runs.found(run)
    parts = [] if result is None else result["summary"]["clusters"]
    if any(each["first_step"] != 1 for each in parts):
        raise errors.NebulaError(
            f"{run.name} was stopped in between, so its seconds are not those"
            f" of one run; remove {runs.path(run.name)}, and it is done again"
        )
    return result


def speeds(
    read: Callable[[table_runs.Run], Mapping[str, Any] | None], base: Sequence[str]
) -> tuple[dict[str, Any], dict[float, dict[str, float]]]:
    """Reads what runs with fixed codecs measured; `read` returns a run's figures.

    Returns:
      This machine's line, from `scaled_wan.read`, and rate -> codec -> seconds a step.
    """
    first = read(fixed_run(*FIRST, {}, base))
    if first is None:
        return {}, {}
    measured, found = first["summary"]["line"], {}
    for line in LINES:
        if line.rates[1:]:
            continue  # of a line that changes both rates have one of their own
        of_line = {}
        for codec in CODECS:
            given = {} if (codec, line) == FIRST else measured
            result = read(fixed_run(codec, line, given, base))
            if result is not None:
                of_line[codec] = abnet_runs.speed_of(result)["seconds"]
        if of_line:
            found[line.rates[0]] = of_line
    return measured, found


def fastest(seconds: Mapping[str, float]) -> str:
    """Returns the codec with the fewest seconds a step."""
    return min(seconds, key=seconds.__getitem__)


def _rows(
    line: Line,
    results: Mapping[str, Mapping[str, Any]],
    fixed: Mapping[float, Mapping[str, float]],
    beside: held_out.BySeed,
) -> list[dict[str, Any]]:
    """Returns the rows of a line, one for each of its rates.

    Args:
      line: of the table.
      results: seed -> figures of the run that chooses.
      fixed: rate -> codec -> seconds, of `speeds`.
      beside: scores with the codec that is the fastest at the last rate.
    """
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
        row["best"] = fastest(row["fixed"])
    # What is compared is the whole run, with what is best on its last rate.
    rows[-1] |= held_out.compare(held_out.by_seed(results), beside)
    return rows


def targets(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Compares what was measured with the targets."""
    found = []
    for row in rows:
        where, over = label(row), _seconds(row) / row["fixed"][row["best"]]
        for what, value, limit in (
            (f"s/step over the best fixed codec's ({where})", over, "over_best"),
            (f"share of probes in settled steps ({where})", _probes(row), "probes"),
        ):
            found.append(sweep.at_most(what, value, LIMITS[limit]))
    return found


def work(
    runs: table_runs.Runs,
    base: Sequence[str],
    seeds: Sequence[str],
    stages: Sequence[str],
) -> None:
    """Does the runs that have not been done.

    Raises:
      errors.NebulaError: in the stage `quality`, if that of `speed` has to come first.
    """
    if "speed" in stages:
        measured, _ = speeds(runs.result, base)
        for seed, line in itertools.product(seeds, LINES):
            runs.result(auto_run(line, measured, base, seed))
    if "quality" in stages:
        _, fixed = speeds(runs.found, base)
        for seed, line in itertools.product(seeds, LINES):
            if line.rates[-1] not in fixed:
                raise errors.NebulaError(
                    f"which codec is the fastest on {line.name} has not been measured:"
                    " --stages=speed comes first"
                )
            best = fastest(fixed[line.rates[-1]])
            runs.result(quality_run(best, line, base, seed))


def record(runs: table_runs.Runs, table: config.Table) -> dict[str, Any]:
    """Returns the record; does the runs of --stages that have not been done."""
    base = table.arguments(table_runs.flagfile(FLAGFILE))
    work(runs, base, table.seeds, config.chosen("stages", STAGES))
    return gather(runs, base, table.seeds)


def markdown(record: Mapping[str, Any]) -> str:
    """Renders the record."""
    ladder, line = record["ladder"], record["line"]
    columns = [
        sweep.Column("line", label),
        *(
            sweep.Column(f"{name}, s/step", functools.partial(_fixed, name), ".3f")
            for name in ladder
        ),
        sweep.Column("auto, s/step", _seconds, ".3f"),
        sweep.Column(
            "/ best", lambda row: _seconds(row) / row["fixed"][row["best"]], ".3f"
        ),
        sweep.Column("settles on", functools.partial(_settles_on, ladder)),
        sweep.Column("from step", lambda row: _of_seeds(row, "from_step", str)),
        sweep.Column("seconds lost before", functools.partial(_mean, "seeking"), ".0f"),
        sweep.Column("probes", _probes, ".1%"),
        *held_out.COLUMNS,
    ]
    return report.join(
        report.heading(record, report.seeds(record), " of runs with `auto`"),
        line
        and f"A step computes for {line['compute_seconds']:.3f} s,"
        f" {line['factor']:.2f} times the paper's; so 60 Mbit/s are"
        f" `--wan={line['wan']}`, and the others in proportion.",
        f"A probe every {record['every']} steps; more often while the run seeks. Means"
        " over seeds. Lost before: the seconds of a run, or of its part after the line"
        " changed, above those of as many steps once it has settled. Probes: their"
        " share of the settled steps' time.",
        held_out.explanation(
            record["rows"], "the fixed codec that is the fastest on the line"
        ),
        sweep.table(columns, record["rows"]),
        report.targets(record["targets"]),
    )


def label(row: Mapping[str, Any]) -> str:
    """Returns the name of a row: its line, and its rate if that changes."""
    name = str(row["line"])
    return f"{name}: at {row['rate']:g}" if "then" in name else name


def _fixed(codec: str, row: Mapping[str, Any]) -> float | None:
    found: float | None = row["fixed"].get(codec)
    return found


def _mean(figure: str, row: Mapping[str, Any]) -> float:
    return statistics.fmean(each[figure] for each in row["seeds"].values())


_seconds, _probes = (functools.partial(_mean, name) for name in ("seconds", "probes"))


def _of_seeds(row: Mapping[str, Any], figure: str, render: Callable[[Any], str]) -> str:
    """Renders a figure of all seeds, once if they agree."""
    found = (render(each[figure]) for each in row["seeds"].values())
    return ", ".join(dict.fromkeys(found))


def _settles_on(ladder: Sequence[str], row: Mapping[str, Any]) -> str:
    def codecs(rungs: Sequence[int]) -> str:
        names = dict.fromkeys(ladder[rung] for rung in rungs)
        return " forward, ".join(names) + (" backward" if len(names) > 1 else "")

    return _of_seeds(row, "rungs", codecs)


def draw(record: Mapping[str, Any], out: pathlib.Path) -> None:
    """Draws the codecs and seconds of the first seed's runs beside the record."""
    if record["curves"]:
        pictures.codec_control(record, out.with_suffix(".png"))


SWEEP = sweep.Sweep(
    "codec_control",
    record,
    markdown,
    figures=abnet_runs.figures,
    draw=draw,
    seeds=abnet_runs.SEEDS,
)

if __name__ == "__main__":
    shared_flags.run(SWEEP.run, names=[*config.FLAGS, "stages"])
