"""Table 1 in Markdown, beside the paper's figures."""

from collections.abc import Mapping, Sequence
from typing import Any

from nebula_jax.evaluation import xnli
from nebula_jax.runtime.records import report


def table1(result: Mapping[str, Any], paper: Mapping[str, Any]) -> str:
    """Renders the record of `table1_xnli` under the paper's rows.

    Args:
      result: the record.
      paper: Table 1 of `paper.json`.
    """
    return report.join(
        report.heading(result, report.seeds(result), " of runs"),
        _accuracies(result["rows"], paper),
        *(_against(result["rows"], name) for name in _compared(result["rows"])),
        _notes(result["rows"]),
        _pretraining(result["rows"]),
        _same(result.get("across_is_same", {})),
        _warnings(result["rows"]),
    )


def _accuracies(rows: Sequence[Mapping[str, Any]], paper: Mapping[str, Any]) -> str:
    languages = paper["languages"]
    cells = [
        [
            f"paper: {row['model']}",
            *(f"{each:.1f}" for each in row["accuracy"]),
            f"{row['average']:.1f}",
            "",
        ]
        for row in paper["rows"]
    ]
    cells += [
        [
            row["name"],
            *(_spread(row, each) for each in (*languages, xnli.AVERAGE)),
            str(row["seeds"]),
        ]
        for row in rows
    ]
    return report.table(["encoder", *languages, "average", "seeds"], cells)


def _spread(row: Mapping[str, Any], name: str) -> str:
    mean = f"{100 * row['accuracy'][name]:.1f}"
    if row["seeds"] == 1:
        return mean
    return f"{mean} ± {100 * row['deviation'][name]:.1f}"


def _compared(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the names of the rows that others are compared with."""
    return [
        each["name"]
        for each in rows
        if any(each["name"] in other.get("against", {}) for other in rows)
    ]


def _against(rows: Sequence[Mapping[str, Any]], name: str) -> str:
    """Renders the differences from the row of this name, in points."""
    cells = []
    for row in rows:
        found = row.get("against", {}).get(name)
        if found is None:
            continue
        cell = [row["name"]]
        for group in ("all", "far"):
            apart = found[group]
            seeds = ", ".join(f"{100 * each:+.1f}" for each in apart["by_seed"])
            low, high = (100 * edge for edge in apart["interval"])
            cell += [f"{100 * apart['mean']:+.2f} ({low:+.2f} to {high:+.2f})", seeds]
        cells.append(cell)
    header = [
        *(f"points above: {name}", "average (95 % of draws of test rows)"),
        *("seed by seed", "sw, ur, hi, th", "seed by seed"),
    ]
    return report.table(header, cells, "lrlrl")


def _same(found: Mapping[str, bool]) -> str:
    if not found:
        return ""
    (same,) = found.values()
    return (
        "With the first seed, with which alone it was tried, M3 across clusters (four"
        " processes) leaves"
        f" {'byte for byte' if same else '**not**'} the encoder that M3 in one process"
        " leaves."
    )


def _notes(rows: Sequence[Mapping[str, Any]]) -> str:
    pairs, tested = ({row[name] for row in rows} for name in ("pairs", "rows"))
    return (
        f"Fine-tuned on {_counts(pairs)} pairs, tested on {_counts(tested)} in each"
        " language, the same for all seeds: ± leaves out how much other test pairs"
        " would change."
    )


def _counts(numbers: set[int]) -> str:
    return ", ".join(f"{number:,}" for number in sorted(numbers))


def _pretraining(rows: Sequence[Mapping[str, Any]]) -> str:
    """Renders the M3 runs that made the rows' encoders."""
    header = ["pre-training, mean of languages", "steps", "minutes"]
    columns = {
        "fake tokens": ("fake_token_rate", ".1%"),
        "RTD AUC": ("rtd_auc", ".3f"),
        "sampled right": ("sampled_mlm_accuracy", ".1%"),
        "CLM right": ("clm_accuracy", ".1%"),
        "most frequent": ("unigram_accuracy", ".1%"),
        "translation gap": ("gap", ".3f"),
        "MLM loss": ("mlm_loss", ".3f"),
    }
    made = [(row["name"], each) for row in rows for each in row["pretraining"]]
    used = {
        name: column
        for name, column in columns.items()
        if any(column[0] in each for _, each in made)
    }
    cells = [
        [
            name,
            str(each["steps"]),
            f"{each['seconds'] / 60:.0f}",
            *(
                " → ".join(report.figure(value, form) for value in each.get(figure, ()))
                for figure, form in used.values()
            ),
        ]
        for name, each in made
    ]
    header += [f"{name}, first → last" for name in used]
    return report.table(header, cells) if cells else ""


def _warnings(rows: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(
        f"- {row['name']}{', with some seed' * (row['seeds'] > 1)}: {line}"
        for row in rows
        for line in _by_kind(row["warnings"])
    )


def _by_kind(warnings: Sequence[str]) -> list[str]:
    """Gathers the languages of each kind of warning, over all seeds.

    Args:
      warnings: of `xnli.warnings`; each begins with its language.
    """
    languages: dict[str, dict[str, None]] = {}
    for line in warnings:
        language, _, warning = line.partition(": ")
        kind = "no better than a guess" if "a guess" in warning else warning
        languages.setdefault(kind, {})[language] = None
    return [f"{kind} in {', '.join(names)}" for kind, names in languages.items()]
