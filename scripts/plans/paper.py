"""The paper's figures beside a plan of its own runs (Tables 3, 4 and 5).

The paper does not state the window, the lines' delay, how many GPUs there were, nor a
device's speed: what is compared are ratios, with the speeds of the plan.
"""

import dataclasses
from typing import Any

from nebula_jax.parallel import planner
from scripts.plans import abnet, settings

RATES = ("170mbit", "60mbit")  # section 4.3
INTER, SPEED_UP = 0.85, 4.34  # Tables 3 and 4
FEW, MANY = 8, 64  # NPUs of Table 4
TABLE_5 = {  # s/step at 60 Mbit/s
    ("identity", "identity"): 4.42,
    ("fp16", "int8(tensor)"): 1.60,
    ("svd(0.6)|fp16", "int8(tensor)"): 1.42,
}


def rows(plan: settings.Settings, run: Any) -> list[dict[str, Any]]:
    """Returns what the plan has beside the paper's figures; none of another run.

    Args:
      plan: its settings.
      run: as the planner takes it.
    """
    delay = plan.lines.up.delay_seconds
    ways = {rate: settings.lines(f"{rate},{1e3 * delay:g}ms") for rate in RATES}
    agreed, local = plan.run.agreed, plan.run.local
    if plan.experiment == "m3":
        sizes = agreed.generator_size, agreed.discriminator_size, agreed.batch_size
        return _m3(plan, run, ways) if sizes == ("base", "large", 2048) else []
    is_papers = local.source_model.endswith("ernie-m-base")
    return _abnet(plan, run, ways["60mbit"]) if is_papers else []


def _m3(
    plan: settings.Settings, run: planner.M3, ways: dict[str, planner.Lines]
) -> list[dict[str, Any]]:
    found = []
    alone = planner.time_of(_on(run, settings.NO_LINE)).seconds
    for rate, line in ways.items():
        here = _on(run, line)
        throughput = alone / planner.time_of(here).seconds
        found.append(_row(f"Table 3, across over within, {rate}", throughput, INTER))
    for rate, line in ways.items():
        times = []
        for number in (FEW, MANY):
            compute = run.discriminator
            scaled = compute.scaled(plan.devices[1] / number)
            fewer = dataclasses.replace(
                _on(run, line),
                discriminator=dataclasses.replace(scaled, update=compute.update),
            )
            times.append(planner.time_of(fewer).seconds)
        name = f"Table 4, {MANY} over {FEW} devices of the discriminator, {rate}"
        found.append(_row(name, times[0] / times[1], SPEED_UP))
    return found


def _on(run: planner.M3, line: planner.Lines) -> planner.M3:
    return dataclasses.replace(run, lines=(line,) * len(run.lines))


def _abnet(
    plan: settings.Settings, run: planner.ABNet, line: planner.Lines
) -> list[dict[str, Any]]:
    found = []
    for texts, seconds in TABLE_5.items():
        forward, backward = abnet.bytes_each_way(plan, texts, run.micro_batches)
        row = dataclasses.replace(
            run, line=line, forward_bytes=forward, backward_bytes=backward
        )
        name = f"Table 5, s/step at 60mbit, {texts[0]} and {texts[1]}"
        found.append(_row(name, planner.time_of(row).seconds, seconds))
    return found


def _row(what: str, planned: float, paper: float) -> dict[str, Any]:
    return {"what": what, "planned": planned, "paper": paper}
