"""Restarts of a run's clusters, and the time that each of them cost.

The launcher writes down each death that it mends, in the run's folder; each cluster
writes down the first step of each of its processes, in its own. Times are seconds since
1970: they are compared across processes, and across starts of the machine.
"""

import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

DEATHS, STARTS = "restarts.jsonl", "starts.jsonl"


def record_death(workdir: pathlib.Path, cluster: str, how: str, now: float) -> None:
    """Records that a cluster died, and that all start again."""
    _append(workdir / DEATHS, {"cluster": cluster, "how": how, "at": now})


def record_first_step(folder: pathlib.Path, step: int, now: float) -> None:
    """Records the first step that a cluster's process has taken, once it is done."""
    _append(folder / STARTS, {"step": step, "at": now})


def read(
    workdir: pathlib.Path, folders: Iterable[pathlib.Path]
) -> list[dict[str, Any]]:
    """Returns restarts: cluster, how, at, seconds until all took a step (or None)."""
    folders = list(folders)
    return [
        death | {"seconds": seconds_until_step(folders, death["at"])}
        for death in _read(workdir / DEATHS)
    ]


def seconds_until_step(folders: Sequence[pathlib.Path], moment: float) -> float | None:
    """Returns the seconds from `moment` to every cluster's next step, or None."""
    took = []
    for folder in folders:
        later = [each["at"] for each in _read(folder / STARTS) if each["at"] >= moment]
        if not later:
            return None
        took.append(min(later) - moment)
    return max(took, default=None)


def markdown(summary: Mapping[str, Any]) -> str:
    """Renders the `restarts` of a run's summary; empty if there were none."""
    lines = [
        f"- {each['cluster']} {each['how']}:"
        + (
            " no step after that"
            if each["seconds"] is None
            else f" {each['seconds']:.1f} s until the next step"
        )
        for each in summary.get("restarts", ())
    ]
    return "\n".join(lines)


def _append(path: pathlib.Path, record: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(record) + "\n")


def _read(path: pathlib.Path) -> Sequence[dict[str, Any]]:
    """Reads the lines of a file; one that a kill cut short does not count."""
    found = []
    for line in path.read_text("utf-8").splitlines() if path.is_file() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found
