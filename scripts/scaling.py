"""Draws where each scenario stops scaling, from a slow line to a fast one.

    python -m scripts.scaling

Nothing is trained: `parallel/planner.py` runs the clusters' pace in virtual time, with
the models, batches and bytes of the paper's flagfiles. Every cluster has one line to
the internet, which its connections share. M3 has 1 to 63 generators, each a cluster,
and a discriminator of as many devices as keep up with them. ABNet has two clusters.
Efficiency is the time of a step without a line over that with it.
"""

import dataclasses
import pathlib
import sys
import time
from collections.abc import Mapping
from typing import Any

from absl import flags

from experiments import shared_flags
from nebula_jax import installed
from nebula_jax.commands import command_line
from nebula_jax.parallel import planner
from nebula_jax.runtime.records import report
from scripts.plans import abnet, count, m3, settings, speed
from scripts.tables import runs as table_runs

with installed.extra("plots"):
    import matplotlib.colors
    import matplotlib.figure

ROOMS: dict[str, Any] = {"m3": m3, "abnet": abnet}
DEVICES = {"m3": (8, 40.0), "abnet": (1, 10.0)}
"""Devices of a generator's cluster, and of each of ABNet's, and the TFLOP/s that each
sustains. Our assumption: ABNet's small batches keep a large device less busy."""
RATES = (10, 20, 50, 100, 170, 300, 1000, 3000, 10000)  # Mbit/s
DELAYS = (1, 5, 15, 30, 75, 150, 300)  # ms, one way
SHOWN_DELAYS = (1, 30, 300)
CLUSTERS = (2, 3, 5, 9, 17, 33, 64)
CODECS = (
    ("identity", "identity"),
    ("fp16", "int8(tensor)"),
    ("pack_tokens|hadamard|int4(32)",) * 2,
)
STEPS = 16  # that a plan averages at least
GOOD = 0.9


def planned(experiment: str, *more: str) -> Any:
    """Returns the planner's run of the paper's settings.

    Args:
      experiment: m3 or abnet.
      more: flags beside its flagfile.
    """
    number, tflops = DEVICES[experiment]
    flagfile = table_runs.flagfile(f"{experiment}_paper")
    flags.FLAGS.unparse_flags()
    command_line.parse(
        [
            *(sys.argv[0], f"--flagfile={flagfile}", f"--experiment={experiment}"),
            *(f"--cluster_devices={number}", f"--device_tflops={tflops}", *more),
        ]
    )
    given, room = settings.from_flags(), ROOMS[experiment]
    device, compute = speed.Speed(1e12 * tflops), {}
    for half in room.halves(given):
        part = count.part(half, number, fsdp=1, model_parallel=1)
        compute[half.name] = device.compute(part, number)
    return room.pace(given, compute, settings.NO_LINE)


def line(rate: float, delay: float, shared_by: int = 1) -> planner.Lines:
    """Returns a line.

    Args:
      rate: Mbit/s.
      delay: milliseconds, one way.
      shared_by: connections, each of which gets its part of the rate.
    """
    one = planner.Line(rate * 1e6 / 8 / shared_by, delay / 1000)
    return planner.Lines(one, one)


def of_m3() -> list[dict[str, float]]:
    """Computes M3's efficiency for every line and number of clusters."""
    alone = planned("m3")
    found = []
    for clusters in CLUSTERS:
        count = clusters - 1
        # K generators' rows on the devices that take a generator's time for them.
        factor = alone.generators[0].micro_batch / alone.discriminator.micro_batch
        run = dataclasses.replace(
            alone,
            generators=alone.generators * count,
            discriminator=alone.discriminator.scaled(factor),
            lines=(settings.NO_LINE,) * count,
        )
        free = planner.time_of(run, steps=STEPS).seconds
        for rate in RATES:
            for delay in SHOWN_DELAYS:
                lines = (line(rate, delay, count),) * count
                slow = dataclasses.replace(run, lines=lines)
                seconds = planner.time_of(slow, steps=STEPS).seconds
                about = {"clusters": clusters, "rate": rate, "delay": delay}
                found.append({**about, "efficiency": free / seconds})
    return found


def of_abnet() -> list[dict[str, Any]]:
    """Computes ABNet's efficiency for every line and three pairs of codecs."""
    found = []
    for forward, backward in CODECS:
        run = planned(
            "abnet", f"--forward_codec={forward}", f"--backward_codec={backward}"
        )
        free = planner.time_of(run, steps=STEPS).seconds
        for rate in RATES:
            for delay in DELAYS:
                slow = dataclasses.replace(run, line=line(rate, delay))
                seconds = planner.time_of(slow, steps=STEPS).seconds
                about = {"codecs": f"{forward}, {backward}"}
                about |= {"rate": rate, "delay": delay}
                found.append({**about, "efficiency": free / seconds})
    return found


def draw(result: Mapping[str, Any], path: pathlib.Path) -> None:
    """Draws efficiency over rate and clusters, and over rate and delay.

    Args:
      result: the record.
      path: of the PNG.
    """
    figure = matplotlib.figure.Figure(figsize=(13, 7.4), layout="constrained")
    above, below = figure.subplots(2, 3)
    for axes, delay in zip(above, SHOWN_DELAYS, strict=True):
        shown = [each for each in result["m3"] if each["delay"] == delay]
        _map(axes, shown, "clusters", CLUSTERS)
        axes.set(title=f"M3, {delay} ms one way", ylabel="clusters")
    for axes, codecs in zip(below, CODECS, strict=True):
        name = ", ".join(codecs)
        shown = [each for each in result["abnet"] if each["codecs"] == name]
        image = _map(axes, shown, "delay", DELAYS)
        short = codecs[0] if codecs[0] == codecs[1] else name
        axes.set(title=f"ABNet, {short}", ylabel="ms one way")
        axes.set_xlabel("Mbit/s of each cluster's line")
    label = "speed beside no line"
    figure.colorbar(image, ax=[*above, *below], label=label, shrink=0.6)
    figure.savefig(path, dpi=110)


def _map(axes: Any, shown: Any, name: str, values: Any) -> Any:
    """Draws one map, with a number in every field."""
    grid = [
        [
            next(
                each["efficiency"]
                for each in shown
                if each["rate"] == rate and each[name] == value
            )
            for rate in RATES
        ]
        for value in values
    ]
    scale = matplotlib.colors.Normalize(0, 1)
    image = axes.imshow(grid, norm=scale, cmap="RdYlGn", origin="lower", aspect="auto")
    for y, row in enumerate(grid):
        for x, each in enumerate(row):
            weight = "bold" if each >= GOOD else None
            axes.text(
                x, y, f"{each:.2f}", ha="center", va="center", size=7, weight=weight
            )
    axes.set_xticks(range(len(RATES)), RATES, fontsize=8)
    axes.set_yticks(range(len(values)), values, fontsize=8)
    return image


def markdown(result: Mapping[str, Any]) -> str:
    """Renders the record in words; the rest is in the picture."""
    rows = []
    for clusters in CLUSTERS:
        row = [str(clusters)]
        for delay in SHOWN_DELAYS:
            good = [
                each["rate"]
                for each in result["m3"]
                if each["clusters"] == clusters
                and each["delay"] == delay
                and each["efficiency"] >= GOOD
            ]
            row.append(f"{min(good):,} Mbit/s" if good else "none of these")
        rows.append(row)
    header = ["M3's clusters", *(f"{delay} ms" for delay in SHOWN_DELAYS)]
    return report.join(
        report.heading(result, "nothing trained"),
        f"The slowest line at which a step keeps {GOOD:.0%} of its speed:",
        report.table(header, rows, "rrrr"),
        "By the planner. Assumed: "
        + "; ".join(
            f"{name}, {number} device{'s' * (number > 1)} of {tflops:g} TFLOP/s"
            for name, (number, tflops) in DEVICES.items()
        )
        + " in each cluster, M3's discriminator with as many as keep up.",
    )


def main() -> int:
    """Computes, draws, writes and prints."""
    begin = time.monotonic()
    out = flags.FLAGS["out"].value or table_runs.config.RESULTS / "scaling.json"
    values = {"m3": of_m3(), "abnet": of_abnet()}
    result = report.provenance(time.monotonic() - begin) | values
    draw(result, pathlib.Path(out).with_suffix(".png"))
    table_runs.write(result, markdown(result), pathlib.Path(out))
    return 0


if __name__ == "__main__":
    # Those of a plan are set here, not by the command.
    shared_flags.run(main, names=["out"])
