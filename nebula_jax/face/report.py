"""The report of a run whose clusters were all on this machine."""

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nebula_jax.runtime.life import restarts
from nebula_jax.runtime.records import page, plots
from nebula_jax.runtime.records import report as records_lib
from nebula_jax.training import metrics

Records = Mapping[str, Sequence[Mapping[str, Any]]]
"""Name of a cluster -> the records of its metrics.jsonl."""


def losses(summaries: Mapping[str, Any], records: Records) -> Sequence[plots.Panel]:
    """Returns the curves of the clusters' losses; none if no loss was logged."""
    del summaries
    found = {
        name: [(each["step"], each["loss"]) for each in of_cluster if "loss" in each]
        for name, of_cluster in records.items()
    }
    return [plots.Panel("loss", "loss", found)] if any(found.values()) else []


def table(summary: Mapping[str, Any]) -> str:
    """Renders a run's clusters."""
    return records_lib.join(records_lib.clusters(summary), records_lib.missing(summary))


def report(
    workdir: pathlib.Path,
    clusters: Mapping[str, pathlib.Path],
    more: Mapping[str, Any],
    seconds: float,
    *,
    curves: Callable[..., Sequence[plots.Panel]] = losses,
    figures: Callable[..., Mapping[str, Any]] = lambda *_: {},
    markdown: Callable[..., str] = table,
) -> None:
    """Writes summary.json, curves and page unless up to date; prints a table.

    Args:
      more: what the summary has of the run, its flags among it.
      seconds: wall time of this command.
      curves: (summaries, records) -> the curves, both by cluster.
      figures: (summaries, records, the run's entries so far, its folder) -> more
        entries.
      markdown: summary -> Markdown.
    """
    path, picture = workdir / "summary.json", workdir / "losses.png"
    found = {name: records_lib.read_summary(each) for name, each in clusters.items()}
    there = [each for each in found.values() if each]
    # One process and clusters may have run here: each is a training of its own.
    before = records_lib.read_summary(workdir).get("clusters", [])
    is_other = [each["cluster"] for each in before] != [
        each["cluster"] for each in there
    ]
    if is_other or records_lib.is_stale(path, clusters.values()):
        records = {name: metrics.read(each) for name, each in clusters.items()}
        panels = [*curves(found, records), *page.line_panels(records)]
        if panels:
            plots.draw(panels, picture)
        summary = {
            **records_lib.provenance(records_lib.wall_seconds(seconds, there)),
            **more,
            "clusters": there,
            "restarts": restarts.read(workdir, clusters.values()),
            "losses": {
                name: records_lib.first_and_last(each) for name, each in records.items()
            },
        }
        summary |= figures(found, records, summary, workdir)
        records_lib.write(path, summary)
        written = records_lib.read_summary(workdir)
        page.of_run(
            workdir / page.NAME,
            written,
            written["clusters"],
            markdown(written),
            panels,
            [line for each in clusters.values() for line in page.samples(each)],
        )
    records_lib.show(markdown(records_lib.read_summary(workdir)))
    records_lib.print_paths(path, picture, workdir / page.NAME)
