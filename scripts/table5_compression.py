"""Reproduces Table 5, Fig. 9 and Fig. 10 on two cores, with more codecs.

    python -m scripts.table5_compression --scale=tiny --data_dir=../shared/data
    python -m scripts.table5_compression --scale=quick --data_dir=../shared/data

The second shows in minutes how the table is made, of some rows, and measures nothing.
Runs `train_abnet` once for each row and seed, one after the other; after a stop, the
same command goes on. Quality and speed are measured apart, since a run that waits for a
slow line takes hours: loss and BLEU of held-out pairs with `--cluster=whole`, where the
same codecs stand between the halves and the numbers are the same; seconds and bytes a
step with a short run of two clusters over a line, whose rate and delay follow from a
step's computation here (`scaled_line`).
"""

import functools
import itertools
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
from scripts.tables import compression_rows, config, held_out, pictures, sweep
from scripts.tables import runs as table_runs

Row = compression_rows.Row
IDEALS = "ideal", "with_round_trip"  # max(compute, wire), without or with a round trip
WAYS = "forward", "backward"
DIFFERENT = 0.05  # relative, from which a whole run's bytes stand beside timed steps'
WIRE_OVER_COMPUTE = 10.0
"""Table 5 was measured between two clusters of 8 V100. Its baseline sends PAPER_BITS
each way a step, in 3.355 s at 60 Mbit/s, and a step takes 4.42 s. A line fitted through
the ten rows leaves 0 to 0.16 s for everything else, and the model's 8.7 TFLOP take
about 0.11 s. So compute is a tenth of the wire's one way, or less. We take a tenth,
which is the hardest case: the less the wire weighs, the less compression gains."""
PAPER_BITS = 128 * 64 * 768 * 32  # section 4.2: batch, length, width, float32
PAPER_RATE = 60e6  # bits per second, section 4.3
PAPER_DELAY = 0.015  # seconds; our choice, as in flags/wan_60mbit.flags
PAPER_COMPUTE = PAPER_BITS / PAPER_RATE / WIRE_OVER_COMPUTE  # 0.336 s


def scaled_line(compute_seconds: float, padded_bits: int) -> dict[str, Any]:
    """Returns the line on which padded float32 takes 10 times the compute, one way.

    This machine computes many times slower, and the tensors are smaller; the one-way
    delay of 15 ms is scaled like the compute, by `factor`. `compute_seconds` are a
    step's, both halves, without codec and line; `padded_bits` are its hidden states',
    one way. Of what is returned `wan` is for --wan, `rate` bits a second, and `delay`
    seconds.

    >>> scaled_line(0.5, 10_000_000)["wan"]
    '2000kbit,22.35ms'
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


def line_of(plain: Mapping[str, Any], settings: Mapping[str, str]) -> dict[str, Any]:
    """Returns the line of all rows, from the baseline's run in one process.

    The median of its steps has neither compiling nor evaluations.
    """
    steps = [
        (after["time"] - before["time"]) / (after["step"] - before["step"])
        for before, after in itertools.pairwise(plain["records"])
    ]
    longest = int(settings["length_buckets"].split(",")[-1])
    values = int(settings["batch_size"]) * longest * width_of(plain)
    return scaled_line(statistics.median(steps), 32 * values)


def width_of(result: Mapping[str, Any]) -> int:
    """Returns the width of the source model of a run."""
    (width,) = {each.get("width") for each in result["summary"]["clusters"]} - {None}
    return width


def quality_run(row: Row, base: Sequence[str], seed: str) -> table_runs.Run:
    """Describes the run that measures loss and BLEU."""
    return table_runs.Run(
        f"quality-{compression_rows.file_name(row.name)}-seed{seed}",
        abnet_runs.MODULE,
        (*base, "--cluster=whole", f"--seed={seed}", *row.flags),
    )


def speed_run(row: Row, line: str, base: Sequence[str]) -> table_runs.Run:
    """Describes the short run of two clusters that measures time and bytes."""
    return table_runs.Run(
        f"speed-{compression_rows.file_name(row.name)}",
        abnet_runs.MODULE,
        (
            *base,
            *("--cluster=all", f"--wan={line}", "--seed=0"),
            *("--log_every=1", "--bleu_sentences=1", "--held_out_pairs=0"),
            f"--steps={abnet_runs.SHORT_STEPS}",
            *row.flags,
        ),
    )


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

    Both directions are busy at once. `round_trips` are added to the wire: every step
    has one, as it ends only when the answer to its last message has come back.
    """
    up = wan.from_string(line["wan"]).up
    wire = 8 * max(speed["forward"], speed["backward"]) / up.rate
    return max(line["compute_seconds"], wire + round_trips * 2 * up.delay)


def _quality(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    cluster = results[0]["summary"]["clusters"][0]
    sent = cluster.get("sent", {})
    return {
        "bleu": abnet_runs.bleus(results),
        "losses": [result["losses"] for result in results],
        "bytes_all_steps": {
            way: sum(size for name, size in sent.items() if name.startswith(channel))
            / cluster["last_step"]
            for way, channel in zip(WAYS, ("hidden[", "gradient["), strict=True)
        },
    }


def record(runs: table_runs.Runs, table: config.Table) -> dict[str, Any]:
    """Returns the record of --rows and the baseline; does the runs that are missing."""
    settings, base = abnet_runs.base_of(table)
    known = compression_rows.rows()
    if table.scale == abnet_runs.QUICK:
        known = [row for row in known if row.name in compression_rows.QUICK]
    chosen = compression_rows.chosen(known)
    first = chosen[0]

    def results(row: Row) -> dict[str, dict[str, Any]]:
        return runs.of_seeds(functools.partial(quality_run, row, base), table.seeds)

    baseline = results(first)
    line = line_of(baseline[table.seeds[0]], settings)
    plain = held_out.by_seed(baseline)

    def quality(row: Row) -> dict[str, Any]:
        found = results(row)
        scores = plain if row == first else held_out.by_seed(found)
        return _quality(list(found.values())) | held_out.compare(scores, plain)

    rows, padded = [], None
    for row in chosen:
        speed = runs.result(speed_run(row, line["wan"], base))
        summary = speed["summary"]
        padded, width = summary["bytes"]["padded"], width_of(speed)
        seconds = abnet_runs.speed_of(speed)
        ideals = {
            name: ideal_seconds(seconds, line, round_trips)
            for round_trips, name in enumerate(IDEALS)
        }
        codecs_of = row.forward, row.backward
        rows.append(
            {
                **row._asdict(),
                "speed": seconds | ideals,
                "formula": [formula_ratio(each, settings, width) for each in codecs_of],
                **quality(row),
            }
        )
    has_starts = any(row.name == compression_rows.START_ROW for row in chosen)
    starts = compression_rows.starts(settings) if has_starts else []
    if table.scale == abnet_runs.QUICK:
        del starts[1:]
    return {
        "settings": dict(settings),
        "padded_bytes": padded,
        "line": line,
        "rows": rows,
        "starts": [{"step": step, **quality(row)} for step, row in starts],
    }


def markdown(record: Mapping[str, Any]) -> str:
    """Renders the record; rows not run yet are left out."""
    theirs, ours = (
        [row for row in record["rows"] if row["is_ours"] == is_ours]
        for is_ours in (False, True)
    )
    our_columns = _our_columns(record)
    return report.join(
        report.heading(record, report.seeds(record), " of runs"),
        _line(record),
        held_out.explanation(record["rows"], "the baseline"),
        sweep.table(_paper_columns(record), theirs),
        sweep.table(our_columns, ours, "ll" + "r" * (len(our_columns) - 2)),
        _whole_run(record),
    )


def _paper_columns(record: Mapping[str, Any]) -> list[sweep.Column]:
    def known(figure: Callable[[Mapping[str, float]], float]) -> Any:
        return lambda row: figure(sweep.PAPER["table5"][row["name"]])

    plain = sweep.PAPER["table5"]["baseline"]["seconds"]
    forward, backward, size, seconds, faster, *over = _speed_columns(record)
    return [
        sweep.Column("method", "name"),
        *held_out.COLUMNS,
        sweep.Column("paper", known(lambda each: each["bleu"]), ".2f"),
        forward,
        sweep.Column("eq. 4", lambda row: row["formula"][0], ".3f"),
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
    names = [*dict.fromkeys((row["forward"], row["backward"]))]
    if row["bottleneck"]:
        names.insert(0, f"--bottleneck={row['bottleneck']}")
    return "<br>".join(f"`{name}`" for name in names)


def _speed_columns(record: Mapping[str, Any]) -> list[sweep.Column]:
    """Returns the columns of bytes, beside padded float32's, and of time."""
    padded = record["padded_bytes"]
    (plain,) = (row for row in record["rows"] if row["name"] == "baseline")

    columns: dict[str, tuple[Callable[[Mapping[str, float]], float], str]] = {
        "forward": (lambda each: each["forward"] / padded, ".3f"),
        "backward": (lambda each: each["backward"] / padded, ".3f"),
        "MB a step": (lambda each: (each["forward"] + each["backward"]) / 1e6, ".3f"),
        "s/step": (lambda each: each["seconds"], ".2f"),
        "faster": (lambda each: plain["speed"]["seconds"] / each["seconds"], ".1f"),
        "/ ideal": (lambda each: each["seconds"] / each["ideal"], ".2f"),
        "/ with round trip": (
            lambda each: each["seconds"] / each["with_round_trip"],
            ".2f",
        ),
    }
    return [
        sweep.Column(name, lambda row, figure=figure: figure(row["speed"]), form)
        for name, (figure, form) in columns.items()
    ]


def _line(record: Mapping[str, Any]) -> str:
    line = record["line"]
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
        whole, speed = row["bytes_all_steps"], row["speed"]
        ways = [
            f"{way} {whole[way] / record['padded_bytes']:.3f}"
            for way in WAYS
            if whole[way] and abs(whole[way] / speed[way] - 1) > DIFFERENT
        ]
        if ways:
            found.append(f"{row['name']} {', '.join(ways)}")
    if not found:
        return ""
    return (
        "Bytes above are of the timed steps. Over the whole run, where that differs by"
        f" more than {DIFFERENT:.0%}: {'; '.join(found)}. (What zstd saves depends on"
        " the numbers.)"
    )


SWEEP = sweep.Sweep(
    "table5",
    record,
    markdown,
    figures=abnet_runs.figures,
    draw=pictures.table5,
    scales=list(abnet_runs.CUTS),
)

if __name__ == "__main__":
    shared_flags.run(SWEEP.run, names=["scale", "rows", *config.FLAGS])
