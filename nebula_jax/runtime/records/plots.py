"""Pictures of records: curves against steps, and names beside lines and points.

Nothing here is needed for a run to end well: without matplotlib none is drawn.
"""

import itertools
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from nebula_jax import installed
from nebula_jax.runtime.life import process

MOST_IN_LEGEND = 6  # curves that a legend names; more are named at their ends
UNDER = {"color": "0.7", "linewidth": 5}  # the look of a curve on which others may lie
LABEL_HEIGHT = 0.045  # share of a panel's height that a name at the end of a line takes
DISTANCES = (9, 14, 20, 28, 38)
"""Points (of type) between a point and its name, nearest first."""
MARGIN = 3  # pixels around a name that should stay free


class Panel(NamedTuple):
    """A place in which curves are drawn against steps."""

    title: str
    ylabel: str
    curves: Mapping[str, Sequence[tuple[int, float]]]  # (step, value); one may be empty
    levels: Mapping[str, float] = {}  # dotted lines, in the colors of such curves
    has_mean: bool = False  # True to draw that of the curves too; they have equal steps
    errors: Mapping[str, Sequence[float]] = {}  # of a curve's points, drawn as bars
    under: str = ""  # a curve that is wide and pale, since others may lie on it


def draw(panels: Sequence[Panel], picture: pathlib.Path) -> None:
    """Draws a run's curves; a run ends well without what draws them, and says so."""
    try:
        drawn(panels).savefig(picture, dpi=110)
    except installed.MissingExtra as error:
        process.message(f"no curves were drawn: {error}")


def drawn(panels: Sequence[Panel]) -> Any:
    """Returns the curves as matplotlib's figure; raises installed.MissingExtra."""
    # Imported here, so that clusters, which draw nothing, need not wait for it.
    with installed.extra("plots"):
        import matplotlib.figure
    # A run without pairs has no probes of translations: an empty panel tells nothing.
    panels = [panel for panel in panels if any(panel.curves.values())] or panels
    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / columns)
    size = 5.5 * columns, 4.1 * rows
    figure = matplotlib.figure.Figure(figsize=size, layout="constrained")
    places = figure.subplots(rows, columns, squeeze=False).flat
    for axes, panel in itertools.zip_longest(places, panels):
        if panel is None:  # an odd number of panels
            axes.set_axis_off()
            continue
        axes.set_prop_cycle(_looks(matplotlib))
        lines = {
            name: axes.plot(
                *zip(*points, strict=True),
                label=name,
                marker="o" if len(points) == 1 else "",  # no line is seen of one
                **(UNDER if name == panel.under else {}),
            )[0]
            for name, points in panel.curves.items()
            if points
        }
        if panel.has_mean and len(lines) > 1:
            every = [line.get_ydata() for line in lines.values()]
            steps = next(iter(lines.values())).get_xdata()
            style = {"color": "black", "linewidth": 2.5, "linestyle": "-"}
            mean = np.mean(every, axis=0)
            lines["mean"] = axes.plot(steps, mean, label="mean", **style)[0]
        for name, errors in panel.errors.items():
            line = lines[name]
            style = {"color": line.get_color(), "fmt": "none", "capsize": 3}
            axes.errorbar(*line.get_data(), errors, **style)
        for name, level in panel.levels.items():
            color = lines[name].get_color() if name in lines else "black"
            axes.axhline(level, color=color, linewidth=0.8, linestyle=":")
        axes.set(xlabel="step", ylabel=panel.ylabel, title=panel.title)
        axes.grid(alpha=0.3)
        if len(lines) > MOST_IN_LEGEND:  # more colors look alike
            label_ends(axes, lines)
        elif lines:
            axes.legend(fontsize=8)
    return figure


def _looks(matplotlib: Any) -> Any:
    """Returns the looks of twenty curves, all told apart."""
    return matplotlib.cycler(linestyle=["-", "--"]) * matplotlib.cycler(
        color=matplotlib.colormaps["tab10"](range(10))
    )


def label_ends(axes: Any, lines: Mapping[str, Any]) -> None:
    """Writes the names of lines beside their right ends, none over another."""
    axes.get_ylim()  # brings limits up to date with what was drawn
    to_share = axes.transData + axes.transAxes.inverted()
    ends = {
        name: to_share.transform(line.get_xydata()[-1])[1]
        for name, line in lines.items()
        if math.isfinite(line.get_ydata()[-1])
    }
    names = sorted(ends, key=ends.__getitem__)
    places = _apart([ends[name] for name in names], LABEL_HEIGHT)
    for name, place in zip(names, places, strict=True):
        end = lines[name].get_xdata()[-1], lines[name].get_ydata()[-1]
        color = lines[name].get_color()
        axes.annotate(
            name,
            end,
            (1.03, place),
            textcoords="axes fraction",
            arrowprops={
                **{"arrowstyle": "-", "color": color, "linewidth": 0.5},
                "relpos": (0, 0.5),  # not from the middle, through the name
            },
            color=color,
            fontsize=8,
            fontweight="bold" if name == "mean" else "normal",
            va="center",
        )


def _apart(wanted: Sequence[float], gap: float) -> np.ndarray:
    """Returns places in [0, 1] at least `gap` apart, near the ascending ones wanted."""
    if not len(wanted):  # a loss that is NaN has no end
        return np.zeros(0)
    groups: list[np.ndarray] = []  # the shifts of neighbors that touch
    for number, place in enumerate(wanted):
        groups.append(np.array([place - number * gap]))
        while len(groups) > 1 and groups[-2].mean() > groups[-1].mean():
            last = groups.pop()
            groups[-1] = np.append(groups[-1], last)
    shifts = np.concatenate([np.full(len(each), each.mean()) for each in groups])
    steps = gap * np.arange(len(wanted))
    return np.clip(shifts, 0.0, max(0.0, 1.0 - steps[-1])) + steps


def label_points(axes: Any, labels: Sequence[tuple[float, float, str, str]]) -> None:
    """Writes names beside their points, each where it covers least of what is drawn.

    `axes` have the limits and the size that they will have; labels are x, y, name,
    color.
    """
    axes.figure.draw_without_rendering()  # only now it is known where pixels are
    to_pixels, scale = axes.transData.transform, axes.figure.dpi / 72
    points = to_pixels([each[:2] for each in labels])
    taken = np.concatenate([points, *_drawn(axes)])
    frame = axes.get_window_extent().extents
    angles = np.arange(16) * np.pi / 8
    names: list[np.ndarray] = []
    for x, y, text, color in sorted(labels):
        style = {"fontsize": 8, "color": color}
        trial = axes.annotate(text, (x, y), **style)
        size = trial.get_window_extent()
        trial.remove()
        half, at = np.array([size.width, size.height]) / 2, to_pixels((x, y))
        places = [
            (far, _place(half, far * scale, angle))
            for far, angle in itertools.product(DISTANCES, angles)
        ]
        costs = [
            far + _covers(at + box, at, taken, points, names, frame)
            for far, box in places
        ]
        far, box = places[int(np.argmin(costs))]
        names.append(at + box)
        arrow = {"arrowstyle": "-", "lw": 0.5, "color": "0.6", "shrinkA": 0}
        axes.annotate(
            text,
            (x, y),
            box.mean(axis=0) / scale,
            textcoords="offset points",
            ha="center",
            va="center",
            arrowprops=arrow | {"shrinkB": 3} if far > DISTANCES[1] else None,
            **style,
        )


def _drawn(axes: Any) -> Iterator[np.ndarray]:
    """Yields pixels on the lines, markers and error bars of axes, [P, 2] of each."""
    for line in axes.lines:
        path = line.get_transform().transform(line.get_xydata())
        yield path if line.get_linestyle() == "None" else _along(path)
    for container in axes.containers:  # of error bars
        for bars in container[2]:
            for segment in bars.get_segments():
                yield _along(axes.transData.transform(segment))


def _along(path: np.ndarray) -> np.ndarray:
    """Returns points on a path, a few pixels apart."""
    parts = [path]
    for begin, end in itertools.pairwise(path):
        count = math.ceil(math.dist(begin, end) / (2 * MARGIN))
        parts.append(np.linspace(begin, end, count, endpoint=False))
    return np.concatenate(parts)


def _place(half: np.ndarray, far: float, angle: float) -> np.ndarray:
    """Returns [2, 2], from where to where a name of this half size goes.

    Its edge, not its middle, is so far to the left or right of its point, the origin.
    """
    away = far * np.array([np.cos(angle), np.sin(angle)])
    middle = away + np.sign(np.round(away, 6)) * (half[0], 0)
    return np.array([middle - half, middle + half])


def _covers(
    box: np.ndarray,
    at: np.ndarray,
    taken: np.ndarray,
    points: np.ndarray,
    names: Sequence[np.ndarray],
    frame: np.ndarray,
) -> float:
    """Returns how bad a name's place is, in pixels: what it covers, whose it seems.

    From where to where it goes, [2, 2], with its point [2]; what it should not cover
    [T, 2]; points that have a name [N, 2]; boxes of names that stand; edges of the axes
    [4].
    """
    (low, high), middle, half = box, box.mean(axis=0), (box[1] - box[0]) / 2
    hits = np.sum(np.all((taken > low - MARGIN) & (taken < high + MARGIN), axis=1))
    shared = sum(
        np.prod(np.maximum(0, np.minimum(high, b) - np.maximum(low, a) + 2))
        for a, b in names
    )
    outside = np.sum(np.maximum(0, [*(frame[:2] - low), *(high - frame[2:])]))
    # Nearer to another point than to its own, it would seem to be that one's.
    gaps = np.hypot(*np.maximum(0, np.abs(points - middle) - half).T)
    own = np.hypot(*np.maximum(0, np.abs(at - middle) - half))
    is_astray = np.sum(gaps < own) > 0
    return 60 * hits + 40 * shared + 200 * outside + 150 * is_astray
