"""Table 1 in Markdown, beside the paper's figures."""

from collections.abc import Mapping, Sequence
from typing import Any

from nebula_jax.evaluation import xnli
from nebula_jax.runtime import report


def table1(result: Mapping[str, Any], paper: Mapping[str, Any]) -> str:
    """Renders the record of `table1_xnli` under the paper's rows.

    Args:
      result: the record.
      paper: Table 1 of `paper.json`.
    """
    return report.join(
        report.heading(result, report.seeds(result), " of runs"),
        _accuracies(result["rows"], paper),
        _gains(result["rows"]),
        _notes(result["rows"]),
        _pretraining(result["rows"]),
        report.targets(result["targets"]),
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


def _gains(rows: Sequence[Mapping[str, Any]]) -> str:
    """Renders each row's average less the first one's, seed by seed."""
    if len(rows) < 2:
        return ""
    plain, *others = rows
    cells = []
    for row in others:
        both = zip(row["averages"], plain["averages"], strict=False)
        gains = ", ".join(f"{100 * (after - before):+.1f}" for after, before in both)
        cells.append([row["name"], gains])
    header = [f"points above the encoder {plain['name']}", "seed by seed"]
    return report.table(header, cells, "ll")


def _notes(rows: Sequence[Mapping[str, Any]]) -> str:
    pairs, tested = ({row[name] for row in rows} for name in ("pairs", "rows"))
    notes = [
        f"Fine-tuned on {_counts(pairs)} pairs, tested on {_counts(tested)} in each"
        " language, the same for all seeds: ± leaves out how much other test pairs"
        " would change."
    ]
    notes += [
        f"{row['name']}: fine-tuned with `{' '.join(row['more'])}`."
        for row in rows
        if row["more"]
    ]
    notes += [
        f"{row['name']}: for {row['not_fine_tuned_again']} of {row['seeds']} seeds byte"
        " for byte the encoder of the row above, and so not fine-tuned again."
        for row in rows
        if row.get("not_fine_tuned_again")
    ]
    return report.join(*notes)


def _counts(numbers: set[int]) -> str:
    return ", ".join(f"{number:,}" for number in sorted(numbers))


def _pretraining(rows: Sequence[Mapping[str, Any]]) -> str:
    """Renders the M3 runs that made the rows' encoders."""
    cells = [
        [
            row["name"],
            str(each["steps"]),
            f"{each['seconds'] / 60:.0f}",
            " → ".join(f"{rate:.1%}" for rate in each["fake_token_rate"]),
            " → ".join(f"{auc:.3f}" for auc in each["rtd_auc"]),
        ]
        for row in rows
        for each in row["pretraining"]
    ]
    header = [
        *("M3, mean of languages on held-out text", "steps", "minutes"),
        *("fake tokens, first → last", "RTD AUC, first → last"),
    ]
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
