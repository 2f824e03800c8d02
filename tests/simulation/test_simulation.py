"""Whole runs under drawn faults: nothing lost, nothing altered, and they end."""

import dataclasses

import pytest

from tests.simulation import bugs, faults, shrink, simulate, world

SEEDS = 2_000
PARTS = 20  # tests, which a busy machine can share and a time limit lets pass
OFTEN = 5  # of these: as many seeds as planted bugs are looked for in
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
    with pytest.raises(world.Violation) as found:
        shrink.check(scenario, bug)
    assert f"seed {scenario.seed}" in str(found.value)
    shortest, _ = shrink.shrink(scenario, found.value, bug)
    assert [fault.kind for fault in shortest.tape] == ["flip"]
    assert shrink.violation(shortest, bug)
    assert not shrink.violation(dataclasses.replace(shortest, tape=()), bug)
