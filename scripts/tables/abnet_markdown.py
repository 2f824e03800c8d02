"""Tables 2 and 5 in Markdown, beside the paper's figures."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from nebula_jax.runtime.records import report
from scripts.tables import held_out
from scripts.tables.paper import PAPER

NOTHING = report.NOTHING
DIFFERENT = 0.05
"""Relative difference of bytes from which a whole run's stand beside timed steps'."""
BLEU_ALONE = ("BLEU",)
"""The column of quality in records of runs without held-out pairs: of the test set."""
MASKED = (
    "Mask-predict's loss is of masked pieces, from the others on both sides of them; so"
    " it is not compared with that of pieces from those before."
)


def table5(result: Mapping[str, Any]) -> str:
    """Renders the record of `table5_compression`; rows not run yet are left out."""
    return report.join(
        report.heading(result, report.seeds(result), " of runs"),
        _line(result),
        held_out.explanation(result["rows"], "the baseline"),
        _paper_rows(result),
        _our_rows(result),
        _whole_run(result),
        report.targets(result["targets"]),
    )


def _line(result: Mapping[str, Any]) -> str:
    line = result["line"]
    if not line:
        return ""
    seconds = line["padded_bits"] / line["rate"]
    return (
        f"A step computes for {line['compute_seconds']:.3f} s, {line['factor']:.2f}"
        f" times the paper's; so the line is `--wan={line['wan']}`, on which"
        f" {result['padded_bytes'] / 1e6:.2f} MB, a step's hidden states as padded"
        f" float32, take {seconds:.2f} s one way."
    )


def _paper_rows(result: Mapping[str, Any]) -> str:
    plain, quality, cells = _plain_seconds(result), _quality(result), []
    for row in result["rows"]:
        if row["is_ours"]:
            continue
        paper, speed = PAPER["table5"][row["name"]], row.get("speed")
        cells.append(
            [
                row["name"],
                *quality.cells(row),
                f"{paper['bleu']:.2f}",
                _ratio(row, "forward", result),
                f"{row['formula'][0]:.3f}" if "formula" in row else NOTHING,
                f"{paper['forward']:.2f}",
                _ratio(row, "backward", result),
                f"{paper['backward']:.2f}",
                *_time(speed)[:2],
                f"{paper['seconds']:.2f}",
                _faster(speed, plain),
                f"{PAPER['table5']['baseline']['seconds'] / paper['seconds']:.1f}",
                *_time(speed)[2:],
            ]
        )
    header = [
        *("method", *quality.header, "paper"),
        *("forward", "eq. 4", "paper", "backward", "paper"),
        *("MB a step", "s/step", "paper", "faster", "paper", "/ ideal"),
        "/ with round trip",
    ]
    return report.table(header, cells) if cells else ""


def _our_rows(result: Mapping[str, Any]) -> str:
    plain, quality, cells = _plain_seconds(result), _quality(result), []
    for row in result["rows"]:
        if not row["is_ours"]:
            continue
        speed = row.get("speed")
        names = dict.fromkeys((row["forward"], row["backward"]))
        if row.get("bottleneck"):
            names = [f"--bottleneck={row['bottleneck']}", *names]
        if row.get("staleness"):
            names = [*names, f"--staleness={row['staleness']}"]
        cells.append(
            [
                row["name"],
                "<br>".join(f"`{name}`" for name in names),
                *quality.cells(row),
                _ratio(row, "forward", result),
                _ratio(row, "backward", result),
                *_time(speed)[:2],
                _faster(speed, plain),
                *_time(speed)[2:],
            ]
        )
        for rank, found in row.get("ranks", {}).items():
            name = f"with {rank} of its columns"
            figures = quality.cells({"held_out": found})
            cells.append([name, "", *figures, *[""] * 7])
    header = [
        *("ours", "codecs, forward and backward", *quality.header),
        *("forward", "backward"),
        *("MB a step", "s/step", "faster", "/ ideal", "/ with round trip"),
    ]
    alignment = "ll" + "r" * (len(header) - 2)
    return report.table(header, cells, alignment) if cells else ""


def _whole_run(result: Mapping[str, Any]) -> str:
    """Renders the bytes of whole runs, where they are not those of the timed steps."""
    found = []
    for row in result["rows"]:
        whole, speed = row.get("bytes_all_steps", {}), row.get("speed", {})
        ways = [
            f"{way} {whole[way] / result['padded_bytes']:.3f}"
            for way in ("forward", "backward")
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


def table2(result: Mapping[str, Any]) -> str:
    """Renders the record of `table2_bleu` under the paper's rows."""
    pairs = list(PAPER["table2"]["pairs"])
    ours = [each for row in result["rows"] for each in row["pairs"]]
    quality = _quality({"rows": ours})
    rows = []
    for row in PAPER["table2"]["rows"]:
        cells = [f"{row[pair]:.2f}" if row[pair] else NOTHING for pair in pairs]
        of_pairs = [each for cell in cells for each in quality.of_paper(cell)]
        rows.append([f"paper: {row['method']}", *of_pairs, "", ""])
    for row in result["rows"]:
        scores = {each["pair"]: each for each in row["pairs"]}
        of_pairs = [
            each for pair in pairs for each in quality.cells(scores.get(pair, {}))
        ]
        parameters = f"{row['trained_parameters'] / 1e6:.1f} million"
        minutes = f"{row['seconds'] / 60:.1f}"
        rows.append([row["method"], *of_pairs, parameters, minutes])
    header = pairs
    if quality.header != BLEU_ALONE:
        header = [f"{pair}: {name}" for pair in pairs for name in quality.header]
    return report.join(
        report.heading(result, report.seeds(result), " of runs"),
        held_out.explanation(ours, "ABNet"),
        report.table(["method", *header, "trained parameters", "minutes"], rows),
        MASKED if any("held_out" in each for each in ours) else "",
    )


class _Quality(NamedTuple):
    """The columns of quality."""

    header: Sequence[str]
    cells: Callable[[Mapping[str, Any]], list[str]]
    """Renders those of a row."""

    def of_paper(self, bleu: str) -> list[str]:
        """Returns those of a row of the paper, which has BLEU alone."""
        return [bleu if name == "BLEU" else "" for name in self.header]


def _quality(result: Mapping[str, Any]) -> _Quality:
    """Returns loss and BLEU of held-out pairs, if the record has any; else BLEU."""
    if any("held_out" in row for row in result["rows"]):
        return _Quality(
            [each.name for each in held_out.COLUMNS],
            lambda row: [each.cell(row) for each in held_out.COLUMNS],
        )
    return _Quality(BLEU_ALONE, lambda row: [_bleu(row)])


def _bleu(row: Mapping[str, Any]) -> str:
    scores: Sequence[float] = row.get("bleu", ())
    if not scores:
        return NOTHING
    mean = f"{statistics.fmean(scores):.2f}"
    return f"{mean} ± {statistics.stdev(scores):.2f}" if len(scores) > 1 else mean


def _ratio(row: Mapping[str, Any], way: str, result: Mapping[str, Any]) -> str:
    """Divides measured bytes by those of padded float32."""
    if "speed" not in row:
        return NOTHING
    return f"{row['speed'][way] / result['padded_bytes']:.3f}"


def _time(speed: Mapping[str, float] | None) -> list[str]:
    """Renders MB both ways, seconds, and seconds over both ideals."""
    if speed is None:
        return [NOTHING] * 4
    return [
        f"{(speed['forward'] + speed['backward']) / 1e6:.3f}",
        f"{speed['seconds']:.2f}",
        f"{speed['seconds'] / speed['ideal']:.2f}",
        f"{speed['seconds'] / speed['with_round_trip']:.2f}",
    ]


def _plain_seconds(result: Mapping[str, Any]) -> float | None:
    for row in result["rows"]:
        if row["name"] == "baseline" and "speed" in row:
            return row["speed"]["seconds"]
    return None


def _faster(speed: Mapping[str, float] | None, plain: float | None) -> str:
    if speed is None or plain is None:
        return NOTHING
    return f"{plain / speed['seconds']:.1f}"
