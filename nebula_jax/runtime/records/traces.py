"""The traces of a run's processes: each in its cluster's folder, and one of all."""

import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nebula_jax import trace as trace_lib
from nebula_jax.communication import ranks
from nebula_jax.communication.worker_link import AnyLink
from nebula_jax.runtime.life import process
from nebula_jax.runtime.records import report

NAME = "trace.json"
OTHER = "other"  # the time that no span has


def write(trace: trace_lib.Trace, folder: pathlib.Path, cluster: str) -> None:
    """Writes the trace of this process."""
    rank = ranks.rank()
    trace.write(folder / _name(rank), f"{cluster}/{rank}" if rank else cluster)


def _name(rank: int) -> str:
    return f"trace-{rank}.json" if rank else NAME


def time(trace: trace_lib.Trace, links: Sequence[AnyLink]) -> dict[str, Any]:
    """Returns where the time of this process went, and what crossed its lines.

    JSON values: `seconds`, their `parts`, `cpu_seconds` since the first step, and the
    bytes of each line as this side and as the kernel counts them.
    """
    ledger = trace.ledger
    parts = dict(sorted(ledger.parts.items(), key=lambda item: -item[1]))
    return {
        "seconds": ledger.seconds,
        "cpu_seconds": ledger.cpu_seconds,
        "parts": {**parts, OTHER: ledger.other},
        "lines": {link.peer.cluster: link.traffic for link in links},
    }


def gather(
    folder: pathlib.Path, clusters: Iterable[pathlib.Path], processes: int
) -> None:
    """Writes one trace of all `processes` of each cluster, if the run was traced.

    What others have left there, of an attempt before, is not gathered.
    """
    names = [_name(rank) for rank in range(processes)]
    parts = [each / name for each in clusters for name in names]
    if parts := [part for part in parts if part.is_file()]:
        trace_lib.merge(parts, folder / NAME)
        process.progress(f"trace: {folder / NAME} (open it in ui.perfetto.dev)")


def markdown(summaries: Sequence[Mapping[str, Any]]) -> str:
    """Renders where the time of each cluster went; empty without a trace."""
    traced = [each for each in summaries if "time" in each]
    if not traced:
        return ""
    names = list(dict.fromkeys(part for each in traced for part in _parts(each)))
    names = [*(name for name in names if name != OTHER), OTHER]
    rows = [
        [
            each["cluster"],
            f"{each['time']['seconds']:.1f} s",
            *(_share(_parts(each).get(name, 0.0), each) for name in names),
        ]
        for each in traced
    ]
    lines = [
        f"{each['cluster']} to {peer}: {line['frames']:,} bytes of frames and"
        f" {line['tls']:,} of TLS; the kernel sent {line['kernel_sent']:,}."
        for each in traced
        for peer, line in each["time"]["lines"].items()
        if line.get("kernel_sent")
    ]
    table = report.table(["cluster", "time", *names], rows)
    return report.join("Where the time went:", table, "\n".join(lines))


def _parts(summary: Mapping[str, Any]) -> Mapping[str, float]:
    return summary["time"]["parts"]


def _share(seconds: float, summary: Mapping[str, Any]) -> str:
    return f"{seconds / max(summary['time']['seconds'], 1e-9):.1%}"
