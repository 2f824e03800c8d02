"""The main results in one table, for README.md."""

import json
import pathlib
import statistics
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from experiments.m3 import report as m3_report
from nebula_jax.evaluation import xnli
from nebula_jax.runtime.records import report
from scripts.tables import abnet, held_out, long_run_markdown

Record = Mapping[str, Any]


def markdown(results: pathlib.Path) -> str:
    """Renders one row for each of ROWS.

    Args:
      results: folder of the records.
    """
    rows = []
    for row in ROWS:
        record = json.loads((results / f"{row.record}.json").read_text("utf-8"))
        link = f"[{row.record}](experiments/README.md#{row.record})"
        rows.append([row.what, row.figures(record), link])
    return report.join(report.table(["what", "result", "command, record"], rows, "lll"))


def _m3(record: Record) -> str:
    last = record["held_out"][-1]
    found = (each["rtd_auc"] for each in last["languages"].values())
    values = [value for value in found if value is not None]
    mean, low, high = (
        report.figure(value, ".2f")
        for value in (
            m3_report.mean(last, "rtd_auc"),
            min(values, default=None),
            max(values, default=None),
        )
    )
    return f"AUC {mean} ({low} to {high}) after {last['step']:,} steps; a guess has 0.5"


def _points(record: Record, row: str, other: str) -> str:
    """Renders by how much a row's average is above another one's."""
    rows = {row["name"]: row for row in record["rows"]}
    apart, seeds = rows[row]["against"][other]["all"], rows[row]["seeds"]
    low, high = (100 * edge for edge in apart["interval"])
    return (
        f"{100 * apart['mean']:+.1f} points ({low:+.1f} to {high:+.1f};"
        f" {seeds} seed{'s' * (seeds > 1)})"
    )


def _beside_mlm(record: Record) -> str:
    mean = _points(record, "M3", "masked language modeling went on")
    cls = _points(
        record, "M3, [CLS] pooling", "masked language modeling, [CLS] pooling"
    )
    return f"{mean} if a sentence is read by the mean of its tokens, {cls} if by [CLS]"


def _beside_start(record: Record) -> str:
    (same,) = record["across_is_same"].values()
    return (
        f"{_points(record, 'M3', 'as it comes')}; M3 across clusters leaves"
        f" {'the same' if same else 'another'} encoder, byte for byte (1 seed)"
    )


def _twelve(record: Record) -> str:
    mlm = _points(record, "M3", "masked language modeling went on")
    start = _points(record, "M3", "as it comes")
    return (
        f"{mlm} beside masked language modeling, {start} beside the encoder as it comes"
    )


def _table3(record: Record) -> str:
    rows = {row["kind"]: row for row in record["rows"]}
    here, across = (
        rows[name]["step_seconds"] for name in ("one cluster", "two clusters")
    )
    ratios = [before / after for before, after in zip(here, across, strict=True)]
    same = "the same" if all(row["is_identical"] for row in rows.values()) else "other"
    ratio = statistics.median(ratios)
    speed = "no slower, " * (ratio >= 1) + f"{ratio:.2f} of the speed (paper 0.85)"
    return f"{speed}, {same} parameters bit for bit ({len(ratios)} seeds)"


def _int4(record: Record) -> str:
    rows = {row["name"]: row for row in record["rows"]}
    plain, int4 = rows["baseline"], rows["int4 both ways"]
    share = int4["speed"]["forward"] / record["padded_bytes"]
    faster = plain["speed"]["seconds"] / int4["speed"]["seconds"]
    return (
        f"{share:.2f} of the bytes, {faster:.1f} times as many steps a second where a"
        f" step waits for the line, {_beside(int4, plain, ' against {}')}"
    )


def _bottleneck(record: Record) -> str:
    rows = {row["name"]: row for row in record["rows"]}
    narrow = rows[NARROW]
    sent = max(abnet.step_bytes(narrow).values())
    return (
        f"{record['padded_bytes'] / sent:.0f} times fewer bytes each way,"
        f" {_beside(narrow, rows['baseline'], ' against {}')}"
    )


def _long_run(record: Record) -> str:
    def words(row: Record) -> str:
        fewer = row["bytes"]["padded"] / max(
            row["bytes"][way] for way in long_run_markdown.WAYS
        )
        lost = long_run_markdown.lost(row)
        return (
            f"{row['name']}: {fewer:.0f} times fewer bytes each way, {lost:+.3f} nats"
        )

    (kept,) = (row for row in record["rows"] if row["name"] == record["chosen"])
    least = min(record["rows"], key=lambda row: row["bytes"]["forward"])
    rows = [kept] if least is kept else [kept, least]
    seeds = len(record["seeds"])
    return f"{'; '.join(map(words, rows))} ({seeds} seed{'s' * (seeds > 1)})"


def _local_steps(record: Record) -> str:
    (row,) = (row for row in record["rows"] if row["key"] == "streaming2")
    apart, time = row["difference"], record["time"]
    return (
        f"{row['bytes']['fewer']:.0f} times fewer bytes, held-out loss"
        f" {apart['mean']:+.1%} ± {apart['standard_error']:.1%} ({apart['seeds']}"
        f" seeds), {time['all'] / time['between']:.2f} times the time of computing"
        " alone"
    )


def _table2(record: Record) -> str:
    of_pairs: dict[str, dict[str, Record]] = {}
    for row in record["rows"]:
        for each in row["pairs"]:
            of_pairs.setdefault(each["pair"], {})[row["method"]] = each
    found = []
    for pair, rows in of_pairs.items():
        (scratch,) = held_out.bleus([rows["Transformer, from scratch"]])
        words = _beside(
            rows["ABNet-Cloud"], rows["ABNet"], " against {} in one process"
        )
        alone = f"{statistics.fmean(scratch):.1f} from scratch"
        found.append(f"{pair}: {words}, {alone}")
    return "; ".join(found)


def _beside(row: Record, plain: Record, against: str) -> str:
    """Renders a row's quality beside that of another: loss, if it is there, and BLEU.

    Args:
      row: of Table 2 or 5.
      plain: the other one.
      against: has {} for the BLEU of the other.
    """
    bleus = held_out.bleus([row, plain])
    bleu, before = map(statistics.fmean, bleus)
    words = f"BLEU {bleu:.1f}{against.format(f'{before:.1f}')}"
    seeds = f"({len(bleus[0])} seeds)"
    found = row.get("held_out", {})
    if "difference" not in found:
        return f"{words} {seeds}"
    loss = held_out.with_error(found["difference"], "+.3f")
    apart = held_out.interval(found["bleu_difference"])
    return f"held-out loss {loss} nats, {words}, {apart} {seeds}"


def _xnli(record: Record) -> str:
    if not record["rows"]:
        return report.NOTHING  # `--stages=choose` alone
    (row,) = record["rows"]
    accuracy = dict(row["accuracy"])
    average = accuracy.pop(xnli.AVERAGE)
    low, high = (pick(accuracy.values()) for pick in (min, max))
    apart, seeds = f" ± {row['deviation'][xnli.AVERAGE]:.1%}", f"{row['seeds']} seeds"
    if row["seeds"] == 1:
        apart, seeds = "", "1 seed"
    return (
        f"{average:.1%}{apart} on average ({low:.1%} to {high:.1%}; {seeds}), on"
        f" {row['rows']:,} pairs a language"
    )


def _bridge(record: Record) -> str:
    """Renders what was measured: `--transports` may have left out some."""
    values = {each["what"]: each["value"] for each in record["targets"]}
    tcp, tls = (
        report.figure(values.get(f"{name}: 25 MB, throughput / {to}"), ".2f")
        for name, to in (("bridge", "tcp"), ("bridge_tls", "tls"))
    )
    trip = None
    if "bridge_tls" in record["transports"]:
        measured = record["transports"]["bridge_tls"]["round trip"]
        trip = measured["p50_microseconds"]["median"]
    return (
        f"{tcp} of TCP's throughput, {tls} of TLS's; a round trip of"
        f" {report.figure(trip, '.0f')} µs with TLS"
    )


def _training(record: Record) -> str:
    """Renders the ratios; there are none if PyTorch was not installed."""

    def span(name: str) -> str:
        rates = [
            step[name]
            for each in record["measured"]
            for step in each["steps"]
            if step["name"] == "here, bfloat16" and step[name] is not None
        ]
        ends = min(rates, default=None), max(rates, default=None)
        return " to ".join(report.figure(end, ".1f") for end in ends)

    return (
        f"{span('over_pytorch')} times PyTorch's float32 rate,"
        f" {span('over_same')} times its bfloat16 rate"
    )


NARROW = "bottleneck of 208 by token and zstd"
"""The row of Table 5 that the front page has of those with a bottleneck: of those
with 25 times fewer bytes at the baseline's loss and BLEU, the one with most seeds."""


class Row(NamedTuple):
    """A row of the front page."""

    record: str
    """Its name, and that of its section."""
    what: str
    """The first column: the subject, in words."""
    figures: Callable[[Record], str]
    """Renders the record's figures in words."""


ROWS = (
    Row(
        "m3_xnli15_tiny", "M3 from scratch: replaced tokens found in 15 languages", _m3
    ),
    Row(
        "table1_six",
        "XNLI after M3, beside masked language modeling as long",
        _beside_mlm,
    ),
    Row("table1_six", "XNLI after M3, beside the encoder as it comes", _beside_start),
    Row(
        "table1_twelve",
        "XNLI after M3, where the encoder has twelve layers, not six",
        _twelve,
    ),
    Row("table2_tiny", "ABNet-Cloud: translation across two clusters", _table2),
    Row("table3", "M3 across 170 Mbit/s beside no line between its clusters", _table3),
    Row("table5_bottleneck", "4-bit numbers both ways beside padded float32", _int4),
    Row(
        "table5_bottleneck", "208 of 384 columns across the cut, at 4 bits", _bottleneck
    ),
    Row("long_run", "Translation for longer, loss beside fp16 and int8", _long_run),
    Row(
        "local_steps", "BERT in two clusters beside an all-reduce a step", _local_steps
    ),
    Row("xnli_recipe", "A small encoder fine-tuned on English, 15 languages", _xnli),
    Row("bench_bridge", "The bridge beside bare sockets, 25 MB tensors", _bridge),
    Row("bench_training", "A bfloat16 training step on two CPU cores", _training),
)
