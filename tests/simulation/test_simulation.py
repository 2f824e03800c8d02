"""Whole runs under drawn faults: nothing lost, nothing altered, and they end."""

import dataclasses

import pytest

from tests.simulation import bugs, faults, shrink, simulate, world

SEEDS = 2_000
PARTS = 20  # tests, which a busy machine can share and a time limit lets pass
OFTEN = 3  # of these: more seeds than it takes to find any of the planted bugs
REST = [pytest.param(n, marks=pytest.mark.slow) for n in range(OFTEN, PARTS)]


@pytest.mark.parametrize("part", [*range(OFTEN), *REST])
def test_runs_come_out_as_without_faults(part):
    for seed in range(part, SEEDS, PARTS):
        shrink.check(faults.draw(seed))


def test_a_seed_gives_the_same_run_again():
    for seed in range(10):
        once, again = (simulate.Simulation(faults.draw(seed)) for _ in range(2))
        once.run()
        again.run()
        assert once.world.log == again.world.log
        assert (once.world.events, once.world.now) == (
            again.world.events,
            again.world.now,
        )


def test_a_failure_shows_its_seed_and_a_shorter_tape():
    bug = bugs.BUGS["a checksum is not compared"]
    scenario = next(
        scenario
        for scenario in map(faults.draw, range(500))
        if len(scenario.tape) > 1 and shrink.violation(scenario, bug)
    )
    shortest, _ = shrink.shrink(scenario, shrink.violation(scenario, bug), bug)
    assert [fault.kind for fault in shortest.tape] == ["flip"]
    with pytest.raises(world.Violation, match=f"seed {scenario.seed}") as found:
        shrink.check(shortest, bug)
    assert shrink.describe(shortest) in str(found.value)
    assert not shrink.violation(dataclasses.replace(shortest, tape=()), bug)
