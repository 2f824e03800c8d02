"""Reproduces Table 5, Fig. 9 and Fig. 10 on two cores, with more codecs.

    python -m scripts.table5_compression --scale=tiny --data_dir=../shared/data

Runs `train_abnet` once for each row and seed, one after the other; after a stop, the
same command goes on. Quality and speed are measured apart, since a run that waits for a
slow line takes hours: loss and BLEU of held-out pairs with `--cluster=whole`, where the
same codecs stand between the halves and the numbers are the same; seconds and bytes a
step with a short run of two clusters over a line, whose rate and delay follow from a
step's computation here (`tables/scaled_line`).
"""

import functools
import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from experiments import shared_flags
from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication import codecs, selector, wan
from nebula_jax.runtime.records import report
from scripts.tables import abnet as abnet_runs
from scripts.tables import (
    compression_rows,
    config,
    held_out,
    paper,
    pictures,
    scaled_line,
    sweep,
)
from scripts.tables import runs as table_runs

Row = compression_rows.Row
STAGES = ("quality", "speed", "start")
"""Loss and BLEU; seconds and bytes; Fig. 10."""
FEWER_BYTES = 8.0
FAR_FEWER_BYTES = 25.0
LOSS_APART = 0.01  # nats
OVER_IDEAL = 1.1
IDEALS = {
    "ideal": "max(compute, wire)",
    "with_round_trip": "the same with one round trip in the wire",
}
WAYS = "forward", "backward"
DIFFERENT = 0.05
"""Relative difference of bytes from which a whole run's stand beside timed steps'."""


def quality_run(row: Row, base: Sequence[str], seed: str) -> table_runs.Run:
    """Describes the run that measures loss and BLEU."""
    return abnet_runs.run(
        f"quality-{compression_rows.file_name(row.name)}-seed{seed}",
        (*base, "--cluster=whole", f"--seed={seed}", *row.flags),
        f"seed{seed}",
    )


def line_run(base: Sequence[str]) -> table_runs.Run:
    """Describes the run that measures a step's computation, for the line of all."""
    shares = table_runs.Folder("seed0", "target/model")
    return table_runs.Run("line", scaled_line.MODULE, (*base, "--seed=0"), shares)


def speed_run(
    row: Row, line: str, settings: Mapping[str, str], base: Sequence[str]
) -> table_runs.Run:
    """Describes the run that measures time and bytes."""
    more_steps = 0
    if row.forward.startswith("delta"):
        # In the first epoch nothing has been seen before: all of it crosses in full.
        more_steps = int(settings["max_pairs"]) // int(settings["batch_size"])
    name = f"speed-{compression_rows.file_name(row.name)}"
    return abnet_runs.short_run(name, row.flags, line, base, more_steps)


def formula_ratio(codec: str, settings: Mapping[str, str], width: int) -> float | None:
    """Returns eq. 4's ratio of a codec; None where the values decide the size.

    The lone r of its numerator is left out: our factors contain the singular values.
    """
    made = codecs.from_string(codec)
    if isinstance(made, selector.Selector):
        return None
    rows = int(settings["batch_size"]) // int(settings["micro_batches"])
    length = int(settings["length_buckets"].split(",")[-1])
    spec = jax.ShapeDtypeStruct((rows, length, width), jnp.float32)
    return codec_lib.ratio(made, spec)


def ideal_seconds(
    speed: Mapping[str, float], line: Mapping[str, float], round_trips: int = 0
) -> float:
    """Returns max(compute, wire): a step if nothing waited for anything else.

    Args:
      speed: of the row; both directions of the line are busy at once.
      line: from `scaled_line.scale`.
      round_trips: of the line, added to the wire. Every step has one: it ends only
        after its last message has arrived and the answer has come back.
    """
    up = wan.from_string(line["wan"]).up
    wire = 8 * max(speed["forward"], speed["backward"]) / up.rate
    return max(line["compute_seconds"], wire + round_trips * 2 * up.delay)


def gather(
    runs: table_runs.Runs,
    settings: Mapping[str, str],
    base: Sequence[str],
    seeds: Sequence[str],
) -> dict[str, Any]:
    """Gathers the figures of the runs that have ended."""
    rows = compression_rows.rows(settings)
    plain = held_out.by_seed(
        runs.of_seeds(functools.partial(quality_run, rows[0], base), seeds)
    )

    def quality(row: Row) -> dict[str, Any]:
        found = runs.of_seeds(functools.partial(quality_run, row, base), seeds)
        scores = plain if row == rows[0] else held_out.by_seed(found)
        return _quality(list(found.values())) | held_out.compare(scores, plain)

    measured = runs.found(line_run(base))
    line = measured["summary"]["line"] if measured else {}
    table, width, padded = [], None, None
    for row in rows:
        found = dict(row._asdict())
        speed = line and runs.found(speed_run(row, line["wan"], settings, base))
        if speed:
            summary = speed["summary"]
            padded = summary["bytes"]["padded"]
            (width,) = {each.get("width") for each in summary["clusters"]} - {None}
            seconds = abnet_runs.speed_of(speed)
            found["speed"] = seconds | {
                name: ideal_seconds(seconds, line, round_trips)
                for round_trips, name in enumerate(IDEALS)
            }
            found["formula"] = [
                formula_ratio(codec, settings, width)
                for codec in (row.forward, row.backward)
            ]
        found |= quality(row)
        if found.keys() != row._asdict().keys():
            table.append(found)
    starts = [
        {"step": step, **quality(row)}
        for step, row in compression_rows.starts(settings)
    ]
    return {
        "settings": dict(settings),
        "padded_bytes": padded,
        "line": line,
        "rows": table,
        "starts": [each for each in starts if "losses" in each],
        "targets": targets(table, padded),
    }


def _quality(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Gathers BLEU on dev and test, training losses and bytes of a row."""
    if not results:
        return {}
    cluster = results[0]["summary"]["clusters"][0]
    sent = cluster.get("sent", {})
    return {
        "bleu": [abnet_runs.bleu(result) for result in results],
        "bleu_dev": [abnet_runs.bleu(result, "dev") for result in results],
        "losses": [result["losses"] for result in results],
        "bytes_all_steps": {
            way: sum(size for name, size in sent.items() if name.startswith(channel))
            / cluster["last_step"]
            for way, channel in zip(WAYS, ("hidden[", "gradient["), strict=True)
        },
    }


def targets(table: Sequence[Mapping[str, Any]], padded: float | None) -> list[dict]:
    """Compares what was measured with the targets."""
    rated = [row for row in table if "speed" in row]
    found = []
    if padded and rated and rated[0]["name"] == "baseline":
        found += _of_quality([row for row in rated if "held_out" in row], padded)
    for ideal, name in IDEALS.items() if rated else ():
        over, worst = max(
            (row["speed"]["seconds"] / row["speed"][ideal], row["name"])
            for row in rated
        )
        what = f"s/step over {name}, at worst ({worst})"
        found.append(report.at_most(what, over, OVER_IDEAL))
    plain, *others = rated or [None]
    if others and plain["name"] == "baseline":
        slowest, name = max((row["speed"]["seconds"], row["name"]) for row in others)
        what = f"s/step over sending plain, slowest codec ({name})"
        found.append(report.at_most(what, slowest / plain["speed"]["seconds"], 1.0))
    return found


def _of_quality(rows: Sequence[Mapping[str, Any]], padded: float) -> list[dict]:
    """Compares the quality of those rows that send 8 and 25 times fewer bytes."""
    found = []
    compared = [row for row in rows if row["held_out"].get("difference")]
    most = {row["name"]: max(abnet_runs.step_bytes(row).values()) for row in compared}

    def bleu_lost(row: Mapping[str, Any]) -> float:
        return -row["held_out"]["bleu_difference"]["difference"]

    small = [row for row in compared if most[row["name"]] <= padded / FEWER_BYTES]
    if small:
        best = min(small, key=bleu_lost)
        what = (
            f"BLEU lost with {FEWER_BYTES:g} times fewer bytes both ways"
            f" ({best['name']}), beside one standard deviation of seeds"
        )
        noise = pooled_deviation(held_out.bleus(rows))
        found.append(report.at_most(what, bleu_lost(best), noise))

    # Of several that lose no BLEU beyond its interval, the one with the lowest loss.
    def lost(row: Mapping[str, Any]) -> tuple[float, float]:
        apart = statistics.fmean(row["held_out"]["difference"].values())
        return max(0.0, -row["held_out"]["bleu_difference"]["high"]), apart

    small = [row for row in compared if most[row["name"]] <= padded / FAR_FEWER_BYTES]
    if small:
        best = min(small, key=lost)
        bleu, apart = lost(best)
        about = f"with {FAR_FEWER_BYTES:g} times fewer bytes both ways ({best['name']})"
        found += [
            report.at_most(
                f"held-out loss above the baseline's {about}, nats", apart, LOSS_APART
            ),
            report.at_most(
                f"BLEU beyond its interval below the baseline's {about}", bleu, 0.0
            ),
        ]
    return found


def pooled_deviation(groups: Sequence[Sequence[float]]) -> float:
    """Returns the standard deviation of runs about the mean of their row."""
    squares = sum(
        (value - statistics.fmean(group)) ** 2 for group in groups for value in group
    )
    return (squares / max(1, sum(len(group) - 1 for group in groups))) ** 0.5


def work(
    runs: table_runs.Runs,
    settings: Mapping[str, str],
    base: Sequence[str],
    seeds: Sequence[str],
    stages: Sequence[str],
    names: Sequence[str],
) -> None:
    """Does the runs that have not been done."""
    rows = compression_rows.rows(settings)
    chosen = [row for row in rows if row.name in names]
    if "speed" in stages:
        line = runs.result(line_run(base))["summary"]["line"]["wan"]
        for row in chosen:
            runs.result(speed_run(row, line, settings, base))
    for seed in seeds:
        if "quality" in stages:
            for row in chosen:
                runs.result(quality_run(row, base, seed))
        if "start" in stages and compression_rows.START_ROW in names:
            for _, row in compression_rows.starts(settings):
                runs.result(quality_run(row, base, seed))


def record(runs: table_runs.Runs, table: config.Table) -> dict[str, Any]:
    """Returns the record; does the runs of --rows and --stages that have not been."""
    flagfile = table_runs.flagfile(f"abnet_{table.name}")
    settings = table_runs.settings(flagfile)
    names = config.chosen("rows", [row.name for row in compression_rows.rows(settings)])
    about = runs, settings, table.arguments(flagfile), table.seeds
    work(*about, config.chosen("stages", STAGES), names)
    return gather(*about)


def markdown(record: Mapping[str, Any]) -> str:
    """Renders the record; rows not run yet are left out."""
    ours = []
    for row in record["rows"]:
        if row["is_ours"]:
            ours.append(row)
            ours += [
                {"name": f"with {rank} of its columns", "held_out": found}
                for rank, found in row.get("ranks", {}).items()
            ]
    theirs = [row for row in record["rows"] if not row["is_ours"]]
    our_columns = _our_columns(record)
    return report.join(
        report.heading(record, report.seeds(record), " of runs"),
        _line(record),
        held_out.explanation(record["rows"], "the baseline"),
        sweep.table(_paper_columns(record), theirs),
        sweep.table(our_columns, ours, "ll" + "r" * (len(our_columns) - 2)),
        _whole_run(record),
        report.targets(record["targets"]),
    )


def _paper_columns(record: Mapping[str, Any]) -> list[sweep.Column]:
    def known(figure: Callable[[Mapping[str, float]], float]) -> Any:
        return lambda row: figure(paper.PAPER["table5"][row["name"]])

    plain = paper.PAPER["table5"]["baseline"]["seconds"]
    forward, backward, size, seconds, faster, *over = _speed_columns(record)
    return [
        sweep.Column("method", "name"),
        *held_out.COLUMNS,
        sweep.Column("paper", known(lambda each: each["bleu"]), ".2f"),
        forward,
        sweep.Column("eq. 4", lambda row: row.get("formula", [None])[0], ".3f"),
        sweep.Column("paper", known(lambda each: each["forward"]), ".2f"),
        backward,
        sweep.Column("paper", known(lambda each: each["backward"]), ".2f"),
        size,
        seconds,
        sweep.Column("paper", known(lambda each: each["seconds"]), ".2f"),
        faster,
        sweep.Column("paper", known(lambda each: plain / each["seconds"]), ".1f"),
        *over,
    ]


def _our_columns(record: Mapping[str, Any]) -> list[sweep.Column]:
    return [
        sweep.Column("ours", "name"),
        sweep.Column("codecs, forward and backward", _codecs),
        *held_out.COLUMNS,
        *_speed_columns(record),
    ]


def _codecs(row: Mapping[str, Any]) -> str:
    if "forward" not in row:
        return ""  # one of the ranks of the row above
    names = [*dict.fromkeys((row["forward"], row["backward"]))]
    if row.get("bottleneck"):
        names.insert(0, f"--bottleneck={row['bottleneck']}")
    if row.get("staleness"):
        names.append(f"--staleness={row['staleness']}")
    return "<br>".join(f"`{name}`" for name in names)


def _speed_columns(record: Mapping[str, Any]) -> list[sweep.Column]:
    """Returns the columns of bytes, beside padded float32's, and of time."""
    padded = record["padded_bytes"]
    plain = {row["name"]: row.get("speed") for row in record["rows"]}.get("baseline")

    def of(figure: Callable[[Mapping[str, float]], float | None]) -> Any:
        def read(row: Mapping[str, Any]) -> float | str | None:
            if "forward" not in row:
                return ""
            return figure(row["speed"]) if "speed" in row else None

        return read

    def faster(speed: Mapping[str, float]) -> float | None:
        return plain and plain["seconds"] / speed["seconds"]

    return [
        sweep.Column("forward", of(lambda each: each["forward"] / padded), ".3f"),
        sweep.Column("backward", of(lambda each: each["backward"] / padded), ".3f"),
        sweep.Column(
            "MB a step",
            of(lambda each: (each["forward"] + each["backward"]) / 1e6),
            ".3f",
        ),
        sweep.Column("s/step", of(lambda each: each["seconds"]), ".2f"),
        sweep.Column("faster", of(faster), ".1f"),
        sweep.Column(
            "/ ideal", of(lambda each: each["seconds"] / each["ideal"]), ".2f"
        ),
        sweep.Column(
            "/ with round trip",
            of(lambda each: each["seconds"] / each["with_round_trip"]),
            ".2f",
        ),
    ]


def _line(record: Mapping[str, Any]) -> str:
    line = record["line"]
    if not line:
        return ""
    seconds = line["padded_bits"] / line["rate"]
    return (
        f"A step computes for {line['compute_seconds']:.3f} s, {line['factor']:.2f}"
        f" times the paper's; so the line is `--wan={line['wan']}`, on which"
        f" {record['padded_bytes'] / 1e6:.2f} MB, a step's hidden states as padded"
        f" float32, take {seconds:.2f} s one way."
    )


def _whole_run(record: Mapping[str, Any]) -> str:
    """Renders the bytes of whole runs, where they are not those of the timed steps."""
    found = []
    for row in record["rows"]:
        whole, speed = row.get("bytes_all_steps", {}), row.get("speed", {})
        ways = [
            f"{way} {whole[way] / record['padded_bytes']:.3f}"
            for way in WAYS
            if speed and whole.get(way) and abs(whole[way] / speed[way] - 1) > DIFFERENT
        ]
        if ways:
            found.append(f"{row['name']} {', '.join(ways)}")
    if not found:
        return ""
    return (
        "Bytes above are of the timed steps. Over the whole run, where that differs by"
        f" more than {DIFFERENT:.0%}: {'; '.join(found)}. (`delta` sends an example's"
        " first visit in full; what zstd saves depends on the numbers; of several"
        " ranks each step draws one. Targets go by whole runs.)"
    )


def draw(record: Mapping[str, Any], out: pathlib.Path) -> None:
    """Draws Fig. 9, Fig. 10 and quality against bytes beside the record."""
    pictures.table5(record, out.parent, out.stem)


SWEEP = sweep.Sweep(
    "table5",
    record,
    markdown,
    figures=abnet_runs.figures,
    draw=draw,
    scales=["tiny"],
    seeds=abnet_runs.SEEDS,
)

if __name__ == "__main__":
    shared_flags.run(SWEEP.run, names=["scale", "rows", "stages", *config.FLAGS])
