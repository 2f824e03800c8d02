"""Writes the results of finished runs into experiments/README.md.

    python -m scripts.make_tables --collect=runs/m3_quickstart   # take in a run
    python -m scripts.make_tables                                # write tables anew

A run's summary.json and plot are kept in experiments/results/ under the run's name. A
benchmark writes there itself, with --out=experiments/results/bench_NAME.json, and so do
table1_xnli, table2_bleu, table5_compression and fake_rates. The README holds one block
per result, between two markers; the text around them is ours.
"""

import json
import pathlib
import shutil
from typing import Any

from absl import flags

from experiments import lifecycle
from nebula_jax import errors
from scripts.tables import abnet_markdown, bench_markdown, m3_markdown, xnli_markdown

COLLECT = flags.DEFINE_string("collect", "", "Folder of a finished run to take in.")

EXPERIMENTS = pathlib.Path(__file__).parents[1] / "experiments"


def collect(run: pathlib.Path, results: pathlib.Path) -> str:
    """Copies a run's summary and plot into `results`; returns the run's name."""
    if not (run / "summary.json").is_file():
        raise errors.NebulaError(f"--collect={run}: no summary.json, so not finished")
    summary = json.loads((run / "summary.json").read_text())
    if any(each["first_step"] != 1 for each in summary.get("clusters", ())):
        raise errors.NebulaError(
            f"--collect={run}: was resumed, so its times are partial"
        )
    commits = summary["commit"].split(", ")  # more than one if it was resumed
    if not all(each.isalnum() and each != "unknown" for each in commits):
        raise errors.NebulaError(
            f"--collect={run}: ran on commit {summary['commit']}, not a clean checkout"
        )
    results.mkdir(exist_ok=True)
    summary.pop("examples", None)  # other people's sentences
    text = json.dumps(summary, indent=1, ensure_ascii=False)
    (results / f"{run.name}.json").write_text(text + "\n")
    if (run / "losses.png").is_file():
        shutil.copyfile(run / "losses.png", results / f"{run.name}.png")
    return run.name


def rewrite(text: str, name: str, block: str) -> str:
    """`text` with `block` between the markers of `name`.

    Raises:
      errors.NebulaError: if the markers are not there.
    """
    begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise errors.NebulaError(f"experiments/README.md has no markers for {name}")
    return before + begin + block + end + after


def m3_block(name: str, summary: dict[str, Any]) -> str:
    """An M3 run's results in Markdown."""
    sizes = summary["bytes"]
    first, last = summary["held_back"][0], summary["held_back"][-1]
    lines = m3_markdown.head(
        summary, f", vocabulary of {summary['vocab_size']:,} pieces"
    )
    lines += [
        "",
        f"Sent per position {sizes['per_position']:.3f} bytes (formula"
        f" {sizes['formula_per_position']:.3f}; the rest is frame heads), per token"
        f" that is not padding {sizes['per_token']:.3f}.",
        "",
        f"Held-back text after step {last['step']} (in brackets: {first['step']}):",
        "",
        "| language | RTD AUC | fake tokens | sampled-MLM accuracy | CLM accuracy |",
        "|---|---:|---:|---:|---:|",
    ]
    for language, figures in last["languages"].items():
        lines.append(
            f"| {language} | {figures['rtd_auc']:.3f}"
            f" ({first['languages'][language]['rtd_auc']:.3f})"
            f" | {figures['fake_token_rate']:.1%}"
            f" ({first['languages'][language]['fake_token_rate']:.1%})"
            f" | {figures['sampled_mlm_accuracy']:.1%}"
            f" | {figures['clm_accuracy']:.1%} |"
        )
    aucs = [figures["rtd_auc"] for figures in last["languages"].values()]
    lines.append(f"| mean of {len(aucs)} | {sum(aucs) / len(aucs):.3f} | | | |")
    lines += ["", f"![Losses and RTD AUC of {name}](results/{name}.png)", ""]
    return "\n".join(lines) + "\n"


def readme(experiments: pathlib.Path = EXPERIMENTS) -> str:
    """experiments/README.md with every block made anew from the results."""
    text = (experiments / "README.md").read_text()
    for path in sorted((experiments / "results").glob("*.json")):
        result = json.loads(path.read_text())
        if path.stem.startswith("m3_"):
            block = m3_block(path.stem, result)
        elif path.stem.startswith("abnet_"):
            block = abnet_markdown.abnet_block(path.stem, result)
        elif path.stem.startswith("xnli_"):
            block = xnli_markdown.run_block(path.stem, result)
        elif path.stem.startswith("table1_"):
            block = xnli_markdown.table1_block(result, abnet_markdown.PAPER["table1"])
        elif path.stem.startswith("table2_"):
            block = abnet_markdown.table2_block(path.stem, result)
        elif path.stem.startswith("table5_"):
            block = abnet_markdown.table5_block(path.stem, result)
        elif path.stem == "fake_rates":
            block = m3_markdown.fakes_block(result)
        elif path.stem.startswith("bench_codecs"):
            block = bench_markdown.codecs_block(result)
        elif path.stem.startswith("bench_training"):
            block = bench_markdown.training_block(result)
        else:
            block = bench_markdown.bridge_block(result)
        text = rewrite(text, path.stem, block)
    return text


def main() -> int:
    """Takes in --collect, and writes the README."""
    if COLLECT.value:
        collect(pathlib.Path(COLLECT.value), EXPERIMENTS / "results")
    (EXPERIMENTS / "README.md").write_text(readme())
    return 0


if __name__ == "__main__":
    lifecycle.run(main)
