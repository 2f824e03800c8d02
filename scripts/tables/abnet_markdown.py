"""Tables 2 and 5 in Markdown, for experiments/README.md: the paper's figures beside."""

import json
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from scripts.tables import m3_markdown

PAPER = json.loads((pathlib.Path(__file__).parent / "paper.json").read_text())
NOTHING = "–"


def table5_block(name: str, result: Mapping[str, Any]) -> str:
    """What `scripts/table5_compression.py` measured; rows not run yet are left out."""
    lines = [*m3_markdown.table_head(result), *_line(result), *_paper_rows(result)]
    lines += _our_rows(result)
    lines += m3_markdown.targets(result)
    if any("losses" in row for row in result["rows"]):
        lines += ["", f"![Fig. 9: training loss](results/{name}_fig9.png)"]
    if result["starts"]:
        lines += ["", f"![Fig. 10: first compressed step](results/{name}_fig10.png)"]
    return "\n".join(lines) + "\n"


def _paper_rows(result: Mapping[str, Any]) -> list[str]:
    rows = [row for row in result["rows"] if not row["is_ours"]]
    if not rows:
        return []
    lines = [
        "| method | BLEU | paper | forward | eq. 4 | paper | backward | paper |"
        " MB a step | s/step | paper | faster | paper | / ideal | / with round trip |",
        "|---|" + "---:|" * 14,
    ]
    plain = _plain_seconds(result)
    for row in rows:
        paper, speed = PAPER["table5"][row["name"]], row.get("speed")
        cells = [
            row["name"],
            _bleu(row),
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
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _our_rows(result: Mapping[str, Any]) -> list[str]:
    rows = [row for row in result["rows"] if row["is_ours"]]
    if not rows:
        return []
    lines = [
        "",
        "| ours | codecs, forward and backward | BLEU | forward | backward"
        " | MB a step | s/step | faster | / ideal | / with round trip |",
        "|---|---|" + "---:|" * 8,
    ]
    plain, notes = _plain_seconds(result), []
    for row in rows:
        speed = row.get("speed")
        names = dict.fromkeys((row["forward"], row["backward"]))
        cells = [
            row["name"],
            "<br>".join(f"`{name.replace('|', chr(92) + '|')}`" for name in names),
            _bleu(row),
            _ratio(row, "forward", result),
            _ratio(row, "backward", result),
            *_time(speed)[:2],
            _faster(speed, plain),
            *_time(speed)[2:],
        ]
        lines.append(f"| {' | '.join(cells)} |")
        if row["forward"].startswith("delta") and "bytes_all_steps" in row:
            share = row["bytes_all_steps"]["forward"] / result["padded_bytes"]
            notes += [
                "",
                "`delta` sends an example's first visit in full; the table has what"
                " comes later. Forward over the whole run, its first epoch included:"
                f" {share:.3f}.",
            ]
    return lines + notes


def _line(result: Mapping[str, Any]) -> list[str]:
    line = result["line"]
    if not line:
        return []
    seconds = line["padded_bits"] / line["rate"]
    return [
        f"A step computes for {line['compute_seconds']:.3f} s, {line['factor']:.2f}"
        f" times the paper's; so the line is `--wan={line['wan']}`, on which"
        f" {result['padded_bytes'] / 1e6:.2f} MB, a step's hidden states as padded"
        f" float32, take {seconds:.2f} s one way.",
        "",
    ]


def table2_block(name: str, result: Mapping[str, Any]) -> str:
    """What `scripts/table2_bleu.py` measured, under the paper's rows."""
    del name
    pairs = list(PAPER["table2"]["pairs"])
    lines = [
        *m3_markdown.table_head(result),
        f"| method | {' | '.join(pairs)} | trained parameters | minutes |",
        "|---|" + "---:|" * (len(pairs) + 2),
    ]
    for row in PAPER["table2"]["rows"]:
        cells = [f"{row[pair]:.2f}" if row[pair] else NOTHING for pair in pairs]
        lines.append(f"| paper: {row['method']} | {' | '.join(cells)} | | |")
    for row in result["rows"]:
        scores = {each["pair"]: each for each in row["pairs"]}
        cells = [_bleu(scores[pair]) if pair in scores else NOTHING for pair in pairs]
        parameters, minutes = row["trained_parameters"], row["seconds"] / 60
        lines.append(
            f"| {row['method']} | {' | '.join(cells)}"
            f" | {parameters / 1e6:.1f} million | {minutes:.1f} |"
        )
    return "\n".join(lines) + "\n"


def abnet_block(name: str, summary: Mapping[str, Any]) -> str:
    """One run of train_abnet."""
    sizes = summary["bytes"]
    lines = m3_markdown.head(summary)
    if sizes:
        lines += [
            "",
            f"Bytes a step: {sizes['forward'] / 1e3:,.0f} kB of hidden states"
            f" ({sizes['forward_ratio']:.3f} of padded float32),"
            f" {sizes['backward'] / 1e3:,.0f} kB of gradients"
            f" ({sizes['backward_ratio']:.3f}).",
        ]
    splits = [split for split in summary["bleu"][-1] if split != "step"]
    lines += ["", f"| BLEU after step | {' | '.join(splits)} |"]
    lines += ["|---:|" + "---:|" * len(splits)]
    for each in summary["bleu"]:
        cells = [f"{each[split]:.1f}" if split in each else "" for split in splits]
        lines.append(f"| {each['step']} | {' | '.join(cells)} |")
    lines += ["", f"![Loss and BLEU of {name}](results/{name}.png)", ""]
    return "\n".join(lines) + "\n"


def _bleu(row: Mapping[str, Any]) -> str:
    scores: Sequence[float] = row.get("bleu", ())
    if not scores:
        return NOTHING
    mean = f"{statistics.fmean(scores):.2f}"
    return f"{mean} ± {statistics.stdev(scores):.2f}" if len(scores) > 1 else mean


def _ratio(row: Mapping[str, Any], way: str, result: Mapping[str, Any]) -> str:
    """Measured bytes over padded float32."""
    if "speed" not in row:
        return NOTHING
    return f"{row['speed'][way] / result['padded_bytes']:.3f}"


def _time(speed: Mapping[str, float] | None) -> list[str]:
    """MB both ways, seconds, seconds over the ideal without and with a round trip."""
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
