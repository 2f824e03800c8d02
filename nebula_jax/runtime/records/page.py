"""A run as a page: one HTML file, which needs no other and no network.

Curves, the line between clusters, the ledger of bytes and seconds, settings, commit,
and whatever Markdown the run's report has: samples of its text, for one.
"""

import html
import io
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import markdown_it

from nebula_jax import files, installed, printable
from nebula_jax.runtime.records import plots, report

NAME = "report.html"
SAMPLES = "samples.txt"  # of a cluster's folder, whose lines are shown as they are
REPLACED = re.compile(r"\{[^}]*\}")  # what a generator put in, as in {dog→cat!}
LEFT_TO_RIGHT = "\u2066\\g<0>\u2069"  # keeps a REPLACED so amid Arabic or Urdu
STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem;
  padding: 0 1rem }
table { border-collapse: collapse; display: block; margin: 1rem 0; overflow-x: auto }
td, th { border-bottom: 1px solid #8884; padding: .2rem .7rem; text-align: left;
  font-variant-numeric: tabular-nums }
pre { background: #8882; overflow-x: auto; padding: .6rem; white-space: pre-wrap }
svg { background: white; height: auto; max-width: 100% }
"""


def of_run(
    path: pathlib.Path,
    summary: Mapping[str, Any],
    clusters: Sequence[Mapping[str, Any]],
    markdown: str,
    panels: Sequence[plots.Panel],
    samples: Sequence[str] = (),
) -> None:
    """Writes the page of a run: summary with `flags`, panels, samples of text."""
    flags = summary.get("flags", {})
    settings = [[f"`--{name}`", _shown(value)] for name, value in flags.items()]
    write(
        path,
        path.parent.name,
        {
            "": markdown,
            "Curves": curves(panels),
            "Samples": "\n".join(
                f"    {REPLACED.sub(LEFT_TO_RIGHT, line)}" for line in samples
            ),
            "The line": _lines(flags.get("wan", ""), clusters),
            "Bytes that crossed": ledger(clusters),
            "Seconds": seconds(clusters),
            "Settings": report.table(["flag", "value"], settings, "ll")
            if settings
            else "",
        },
    )


def samples(folder: pathlib.Path) -> list[str]:
    """Reads the samples of text that a cluster has left in its folder, if any."""
    path = folder / SAMPLES
    return path.read_text("utf-8").splitlines() if path.is_file() else []


def write_samples(folder: pathlib.Path, lines: Sequence[str]) -> None:
    """Replaces the samples of text in a cluster's folder."""
    with files.writing(folder / SAMPLES) as partial:
        partial.write_text("".join(f"{line}\n" for line in lines), "utf-8")


def write(path: pathlib.Path, title: str, sections: Mapping[str, str]) -> None:
    """Writes sections, heading -> Markdown or SVG, as a page; leaves out empty ones."""
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}"
        f"</title><meta name=viewport content='width=device-width'>"
        f"<style>{STYLE}</style><h1>{html.escape(title)}</h1>"
    ]
    # HTML in the Markdown, such as in a run's text, is shown as it is written.
    markdown = markdown_it.MarkdownIt("js-default", {"linkify": False})
    for heading, text in sections.items():
        if text:
            body = text if text.startswith("<svg") else markdown.render(text)
            parts.append(f"<h2>{html.escape(heading)}</h2>{body}" if heading else body)
    with files.writing(path) as partial:
        partial.write_text("\n".join(parts) + "\n", "utf-8")


def curves(panels: Sequence[plots.Panel]) -> str:
    """Returns panels as SVG; a sentence without what draws them."""
    if not panels:
        return ""
    try:
        figure = plots.drawn(panels)
    except installed.MissingExtra as error:
        return f"No curves: {error}"
    import matplotlib

    stream = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "nebula"}):
        figure.savefig(stream, format="svg", metadata={"Date": None})
    drawn = stream.getvalue()
    return drawn[drawn.index("<svg") :]


def line_panels(
    records: Mapping[str, Sequence[Mapping[str, Any]]],
) -> list[plots.Panel]:
    """Returns each cluster's curves of the line, if any: rates each way and waiting."""
    found = [
        ("Sent", "Mbit/s", "sent_mbit"),
        ("Received", "Mbit/s", "received_mbit"),
        ("Waited for others", "share of the time", "waiting_share"),
    ]
    panels = []
    for title, unit, name in found:
        of_each = {
            cluster: [(each["step"], each[name]) for each in of_cluster if name in each]
            for cluster, of_cluster in records.items()
        }
        if any(value for points in of_each.values() for _, value in points):
            panels.append(plots.Panel(title, unit, of_each))
    return panels


def ledgers(cluster: Mapping[str, Any]) -> dict[str, Mapping[str, Sequence[int]]]:
    """Returns peer -> ledger of a cluster's summary; an empty name for the only one."""
    found = cluster.get("ledgers") or cluster.get("ledger") or {}
    is_one = any(isinstance(each, Sequence) for each in found.values())
    return {"": found} if is_one else dict(found)


def ledger(clusters: Iterable[Mapping[str, Any]]) -> str:
    """Renders what each cluster sent and received, by kind."""
    rows = [
        [each["cluster"], peer, kind, f"{count:,}", printable.size(size)]
        for each in clusters
        for peer, entries in ledgers(each).items()
        for kind, (count, size) in entries.items()
    ]
    header, alignment = ["cluster", "peer", "what", "frames", "bytes"], "lllrr"
    if not any(peer for _, peer, *_ in rows):  # each has one peer alone
        header, alignment = [header[0], *header[2:]], "llrr"
        rows = [[row[0], *row[2:]] for row in rows]
    return report.table(header, rows, alignment) if rows else ""


def seconds(clusters: Iterable[Mapping[str, Any]]) -> str:
    """Renders where the seconds of each cluster went."""
    rows = []
    for each in clusters:
        until = each.get("until_first_step", {})
        rows += [
            [each["cluster"], f"until the first step: {name}", f"{value:.1f} s"]
            for name, value in until.items()
        ]
        rows.append([each["cluster"], "training", f"{each['seconds']:.1f} s"])
        waited = f"{each['waited_seconds']:.1f} s"
        rows.append([each["cluster"], "of these, waiting for others", waited])
    return report.table(["cluster", "what", "time"], rows, "llr") if rows else ""


def _lines(wan: str, clusters: Sequence[Mapping[str, Any]]) -> str:
    """Renders the lines between clusters: emulated or not, and what held them up."""
    text = f"Emulated: `{wan}`." if wan else ""
    rows = [
        [
            each["cluster"],
            f"{8e-6 * each['bytes_sent'] / each['seconds']:.3f}",
            f"{8e-6 * each['bytes_received'] / each['seconds']:.3f}",
            f"{each['waited_seconds'] / each['seconds']:.0%}",
        ]
        for each in clusters
        if each["bytes_sent"] or each["bytes_received"]
    ]
    header = ["cluster", "sends, Mbit/s", "gets, Mbit/s", "waited"]
    owners = [
        [each["cluster"], peer, owner]
        for each in clusters
        for peer, owner in each.get("certificates_of_peers", {}).items()
    ]
    titles = ["cluster", "its peer", "certificate of"]
    whose = report.table(titles, owners, "lll") if owners else ""
    return report.join(text, report.table(header, rows), whose) if rows else ""


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value)
