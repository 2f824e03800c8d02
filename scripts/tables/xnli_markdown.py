"""Fine-tuning on XNLI in Markdown, for experiments/README.md: runs, and Table 1."""

from collections.abc import Mapping, Sequence
from typing import Any

from nebula_jax.evaluation import xnli
from scripts.tables import m3_markdown


def run_block(name: str, summary: Mapping[str, Any]) -> str:
    """One run of finetune_xnli."""
    del name
    results, training = summary["test"], summary["training"]
    pairs = sum(summary["text"]["labels"]["train"]["en"].values())
    best = max(each["accuracy"] for each in summary["dev"])
    lines = [
        f"    {summary['command']}",
        "",
        f"{m3_markdown.of_commits(summary['commit'])}, seed {summary['flags']['seed']},"
        f" {m3_markdown.machine(summary)}; {summary['seconds'] / 60:.0f} minutes,"
        f" {pairs:,} English pairs, {training['tokens_per_second']:,.0f} tokens/s with"
        f" compiling and looks at dev. English dev at best {best:.1%}; tested: step"
        f" {summary['selected_step']} of {training['last_step']}.",
        *_resumed(training),
        "",
        *_head(list(results["accuracy"]), "rows a language"),
    ]
    rows = sorted(set(results["rows"].values()))
    cells = [f"{100 * each:.1f}" for each in results["accuracy"].values()]
    lines.append(
        f"| {summary['flags']['encoder']} | {' | '.join(cells)}"
        f" | {100 * results['average']:.1f} | {', '.join(f'{n:,}' for n in rows)} |"
    )
    return "\n".join([*lines, *_warnings(results["warnings"])]) + "\n"


def _resumed(training: Mapping[str, Any]) -> list[str]:
    if training["first_step"] == 1:
        return []
    return [
        f"The run was resumed after step {training['first_step'] - 1}: minutes and"
        " tokens/s are of what came then."
    ]


def table1_block(result: Mapping[str, Any], paper: Mapping[str, Any]) -> str:
    """What `scripts/table1_xnli.py` measured, under the paper's rows.

    Args:
      result: of the script.
      paper: Table 1 of `paper_tables.json`.
    """
    languages = paper["languages"]
    lines = [
        *m3_markdown.table_head(result),
        *_head(languages, "seeds"),
    ]
    for row in paper["rows"]:
        cells = [f"{each:.1f}" for each in row["accuracy"]]
        lines.append(
            f"| paper: {row['model']} | {' | '.join(cells)} | {row['average']:.1f} | |"
        )
    for row in result["rows"]:
        cells = [_spread(row, each) for each in (*languages, xnli.AVERAGE)]
        lines.append(f"| {row['name']} | {' | '.join(cells)} | {row['seeds']} |")
    lines += _gains(result["rows"])
    pairs = sorted({row["pairs"] for row in result["rows"]})
    tested = sorted({row["rows"] for row in result["rows"]})
    lines += [
        "",
        f"Fine-tuned on {', '.join(f'{n:,}' for n in pairs)} pairs, tested on"
        f" {', '.join(f'{n:,}' for n in tested)} in each language, the same for all"
        " seeds: ± does not tell how much other test pairs would change.",
    ]
    lines += [
        line
        for row in result["rows"]
        if row["more"]
        for line in ("", f"{row['name']}: fine-tuned with `{' '.join(row['more'])}`.")
    ]
    lines += [
        line
        for row in result["rows"]
        if row.get("not_fine_tuned_again")
        for line in (
            "",
            f"{row['name']}: for {row['not_fine_tuned_again']} of {row['seeds']} seeds"
            " byte for byte the encoder of the row above, and so not fine-tuned again.",
        )
    ]
    made = [
        (row["name"], each) for row in result["rows"] for each in row["pretraining"]
    ]
    if made:
        lines += [
            "",
            "| M3, mean of languages on held-back text | steps | minutes"
            " | fake tokens, first → last | RTD AUC, first → last |",
            "|---|---:|---:|---:|---:|",
        ]
    for name, each in made:
        fakes = " → ".join(f"{rate:.1%}" for rate in each["fake_token_rate"])
        aucs = " → ".join(f"{auc:.3f}" for auc in each["rtd_auc"])
        lines.append(
            f"| {name} | {each['steps']} | {each['seconds'] / 60:.0f} | {fakes}"
            f" | {aucs} |"
        )
    lines += m3_markdown.targets(result)
    found = [
        f"{row['name']}{', with some seed' * (row['seeds'] > 1)}: {line}"
        for row in result["rows"]
        for line in _by_kind(row["warnings"])
    ]
    return "\n".join([*lines, *_warnings(found)]) + "\n"


def _gains(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each row's average less the first one's, seed by seed."""
    if len(rows) < 2:
        return []
    plain, *others = rows
    lines = [
        "",
        f"| points above the encoder {plain['name']} | seed by seed |",
        "|---|---|",
    ]
    for row in others:
        gains = zip(row["averages"], plain["averages"], strict=False)
        cells = ", ".join(f"{100 * (own - before):+.1f}" for own, before in gains)
        lines.append(f"| {row['name']} | {cells} |")
    return lines


def _head(languages: Sequence[str], last: str) -> list[str]:
    return [
        f"| encoder | {' | '.join(languages)} | average | {last} |",
        "|---|" + "---:|" * (len(languages) + 2),
    ]


def _spread(row: Mapping[str, Any], name: str) -> str:
    mean = f"{100 * row['accuracy'][name]:.1f}"
    if row["seeds"] == 1:
        return mean
    return f"{mean} ± {100 * row['deviation'][name]:.1f}"


def _by_kind(warnings: Sequence[str]) -> list[str]:
    """What is said of several languages, once: `xnli.warnings` begin with theirs.

    Of several seeds, a language is named once.
    """
    languages: dict[str, dict[str, None]] = {}
    for line in warnings:
        language, _, said = line.partition(": ")
        kind = "no better than a guess" if "a guess" in said else said
        languages.setdefault(kind, {})[language] = None
    return [f"{kind} in {', '.join(names)}" for kind, names in languages.items()]


def _warnings(found: Sequence[str]) -> list[str]:
    return ["", *(f"- {line}" for line in found)] if found else []
