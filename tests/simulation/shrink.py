"""Shrinks the tape of a run that breaks a promise: fewer faults, fewer steps."""

import dataclasses
from collections.abc import Sequence

from tests.simulation import bugs, faults, simulate, world

MOST_RUNS = 300
MOST_SEEDS = 500  # until a planted bug must have been found


def violation(
    scenario: faults.Scenario, bug: Sequence[bugs.Patch] = ()
) -> world.Violation | None:
    """Returns the promise that a scenario breaks, if it does; bug: planted."""
    try:
        simulate.Simulation(scenario, bug).run()
    except world.Violation as found:
        return found
    return None


def first_seed(bug: Sequence[bugs.Patch]) -> int | None:
    """Returns the first seed that finds a planted bug, if one does."""
    seeds = range(MOST_SEEDS)
    return next((seed for seed in seeds if violation(faults.draw(seed), bug)), None)


def shrink(
    scenario: faults.Scenario, error: world.Violation, bug: Sequence[bugs.Patch] = ()
) -> tuple[faults.Scenario, world.Violation]:
    """Finds the scenario with the shortest tape that breaks a promise as well, and what
    that breaks: faults are taken out in halves, quarters and so on (ddmin), then steps
    and other figures are made smaller, one by one."""
    runs = 0

    def breaks(candidate: faults.Scenario) -> bool:
        nonlocal runs, scenario, error
        runs += 1
        if found := violation(candidate, bug):
            scenario, error = candidate, found
        return found is not None

    pieces = 2
    while pieces <= 2 * len(scenario.tape) and runs < MOST_RUNS:
        tape, size = scenario.tape, max(1, len(scenario.tape) // pieces)
        for start in range(0, len(tape), size):
            rest = tape[:start] + tape[start + size :]
            if breaks(dataclasses.replace(scenario, tape=rest)):
                pieces = max(2, pieces - 1)
                break
        else:
            pieces *= 2
    while runs < MOST_RUNS and any(map(breaks, faults.simpler(scenario))):
        pass
    return scenario, error


def describe(scenario: faults.Scenario) -> str:
    """Returns a scenario in lines, its tape last."""
    fields = dataclasses.asdict(scenario)
    del fields["tape"]
    lines = [f"{name}: {value}" for name, value in fields.items()]
    return "\n".join([*lines, "tape:", *(f"  {fault}" for fault in scenario.tape)])


def check(
    scenario: faults.Scenario, bug: Sequence[bugs.Patch] = ()
) -> simulate.Simulation:
    """Runs a scenario with a bug; raises world.Violation with the seed, and the
    shortest tape found that shows it."""
    simulation = simulate.Simulation(scenario, bug)
    try:
        simulation.run()
    except world.Violation as error:
        shortest, found = shrink(scenario, error, bug)
        raise world.Violation(
            f"seed {scenario.seed}: {error}\n\nshorter: {found}\n{describe(shortest)}"
        ) from None
    return simulation
