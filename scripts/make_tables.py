"""Writes the records of finished runs into their pages and README.md.

    python -m scripts.make_tables --collect=runs/m3_quickstart   # take in a run
    python -m scripts.make_tables                                # write tables anew

A run's summary.json and plot are kept in experiments/results/ under the run's name; a
benchmark writes there itself, with --out=experiments/results/bench_NAME.json, and so do
the tables' scripts. A record NAME.json has its block in the page NAME.md beside it
(those of SECURITY in SECURITY.md), README.md a table of the main results, each between
two markers; README.md's picture is drawn anew when the records change. The text around
them is written by hand and has no measured figure.
"""

import json
import os
import pathlib
import shutil
from collections.abc import Callable, Mapping
from typing import Any

from absl import flags

from experiments import shared_flags
from experiments.abnet import report as abnet_report
from experiments.bert import report as bert_report
from experiments.m3 import report as m3_report
from experiments.xnli import report as xnli_report
from nebula_jax import errors
from nebula_jax.runtime.records import report
from scripts import (
    bench_bridge,
    bench_codecs,
    bench_device,
    bench_faults,
    bench_peers,
    bench_security,
    leakage,
    table1_xnli,
    table2_bleu,
    table3_throughput,
    table4_speedup,
    table5_compression,
    table_body,
    table_local_steps,
    table_teachers,
)
from scripts.bench import report as bench_report
from scripts.tables import main_results, pictures

flags.DEFINE_string(
    "collect", "", "Folder of a finished run whose record is taken into the results."
)

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "experiments" / "results"


MARKDOWN: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "m3_": m3_report.markdown,
    "abnet_": abnet_report.markdown,
    "xnli_": xnli_report.markdown,
    "table1_": table1_xnli.markdown,
    "table2_": table2_bleu.markdown,
    "table3": table3_throughput.markdown,
    "table4": table4_speedup.markdown,
    "table5_": table5_compression.markdown,
    "bert_": bert_report.markdown,
    "local_steps": table_local_steps.markdown,
    "body": table_body.markdown,
    "teachers": table_teachers.markdown,
    "bench_codecs": bench_codecs.markdown,
    "bench_device": bench_device.markdown,
    "bench_bridge": bench_bridge.markdown,
    "bench_faults": bench_faults.markdown,
    "bench_peers": bench_peers.markdown,
    "bench_security": bench_security.markdown,
    "leakage": leakage.markdown,
    "simulation": bench_report.simulation,
}
"""Beginning of a record's name -> the function that renders the record."""
SECURITY = ("bench_security",)  # the records whose blocks are in SECURITY.md
WITHDRAWN = (
    *("bert_ladder", "mutation_score", "fake_rates", "m3_recipe", "xnli_recipe"),
    *("table1_small", "bench_planner", "scaling", "codec_control", "long_run"),
    *("bench_training", "bench_faults_quorum", "bench_bridge_60mbit"),
    "local_steps_small",
)
"""The records of withdrawn scripts: their blocks stay as the last commit rendered them
that had the script (of table1_small, an older form of one); the page names it."""
OLDER = {
    "bench_bridge": "6bf8fd906d0b",
    "bench_codecs": "51d73997c09b",
    "bench_device": "4f99ff5",
    "leakage": "407a6bcab957",
    "local_steps": "7c44b5b8c671, ae58e4456238, bbbd3ece70e5, d82da901c691",
    "table5_bottleneck": "10409e619166, 784a139770fa, d237132d8695, e90fa4256a32",
    "table5_tiny": "06a40b32538b",
}
"""Record -> its commits, if it has rows or figures whose modes are withdrawn since: as
long as it is this record, its block and pictures stay as they were rendered."""
PICTURES = {  # end of a picture's name, after the record's -> its text
    "": "Curves of {name}",
    "_fig8": "Fig. 8: a run that moved",
    "_fig9": "Fig. 9: training loss",
    "_fig10": "Fig. 10: first compressed step",
}


def collect(run: pathlib.Path, results: pathlib.Path) -> str:
    """Copies a run's summary and plot into `results`, in place of an older run's.

    Returns the run's name, that of its folder. A run that cannot stand in the tables is
    an error, and nothing is written.
    """
    name = pathlib.Path(os.path.abspath(run)).name  # also of `.`
    _markdown_of(name)  # an error at a name of no kind
    page = _page(name, results)
    if not page.is_file():
        raise errors.NebulaError(f"there is no page {page}")
    rewrite(page.read_text("utf-8"), name, "")  # an error without markers
    if not (run / "summary.json").is_file():
        raise errors.SettingsError(f"--collect={run}: no summary.json, so not finished")
    summary = report.read_summary(run)
    if any(each["first_step"] != 1 for each in summary.get("clusters", ())):
        raise errors.SettingsError(
            f"--collect={run}: was resumed, so its times are partial"
        )
    commits = summary["commit"].split(", ")  # more than one if it was resumed
    if not all(each.isalnum() and each != "unknown" for each in commits):
        raise errors.SettingsError(
            f"--collect={run}: ran on commit {summary['commit']}, not a clean checkout"
        )
    results.mkdir(exist_ok=True)
    summary.pop("examples", None)  # other people's sentences
    report.write(results / f"{name}.json", summary)
    picture = results / f"{name}.png"
    if (run / "losses.png").is_file():
        shutil.copyfile(run / "losses.png", picture)
    else:
        picture.unlink(missing_ok=True)  # it is of an older run
    return name


def rewrite(text: str, name: str, block: str) -> str:
    """Replaces the text between the markers of `name`; NebulaError without markers."""
    begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise errors.NebulaError(f"no markers for {name}")
    return before + begin + block + end + after


def block(name: str, results: pathlib.Path) -> str:
    """Renders a record of the folder `results`, with its pictures."""
    record = json.loads((results / f"{name}.json").read_text("utf-8"))
    pictures = [
        f"![{text.format(name=name)}]({name}{ending}.png)"
        for ending, text in PICTURES.items()
        if (results / f"{name}{ending}.png").is_file()
        and (ending or name not in OLDER)  # what has drawn such a one is withdrawn
    ]
    return report.join(_markdown_of(name)(record), *pictures)


def _markdown_of(name: str) -> Callable[[Mapping[str, Any]], str]:
    """Returns the function that renders a record, by the record's name."""
    for prefix, markdown in MARKDOWN.items():
        if name.startswith(prefix):
            return markdown
    raise errors.NebulaError(
        f"{name}.json: a record's name begins with {', '.join(MARKDOWN)}"
    )


def _is_older(record: pathlib.Path) -> bool:
    """Returns True if a record has parts that nothing renders any more."""
    commit = OLDER.get(record.stem)
    return commit == json.loads(record.read_text("utf-8"))["commit"]


def _page(name: str, results: pathlib.Path) -> pathlib.Path:
    """Returns the page that has a record's block."""
    if name in SECURITY:
        return results.parents[1] / "SECURITY.md"
    return results / f"{name}.md"


def pages() -> dict[pathlib.Path, str]:
    """Returns page -> its text with every block made anew from the records."""
    front = ROOT / "README.md"
    table = main_results.markdown(RESULTS)
    found = {front: rewrite(front.read_text("utf-8"), "results", table)}
    choice = ROOT / "nebula_jax" / "communication" / "which_codec.md"
    table = main_results.which_codec(RESULTS)
    found[choice] = rewrite(choice.read_text("utf-8"), "which_codec", table)
    for record in sorted(RESULTS.glob("*.json")):
        name = record.stem
        if name not in WITHDRAWN and not _is_older(record):
            page = _page(name, RESULTS)
            text = found.get(page) or page.read_text("utf-8")
            found[page] = rewrite(text, name, block(name, RESULTS))
    return found


def main() -> int:
    """Takes in --collect, and writes the pages."""
    run = flags.FLAGS["collect"].value
    if run:
        collect(pathlib.Path(run), RESULTS)
    # `pages` makes all of them before any is written: one may be an error.
    for path, text in pages().items():
        path.write_text(text, "utf-8")
    points, picture = pictures.quality_points(RESULTS), RESULTS / pictures.QUALITY
    if pictures.drawn_points(picture) != points:
        pictures.quality(points, picture)
    return 0


if __name__ == "__main__":
    shared_flags.run(main)
