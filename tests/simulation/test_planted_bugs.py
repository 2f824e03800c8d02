"""Each planted bug is found: else the simulation would prove nothing."""

import pytest

from tests.simulation import bugs, faults, simulate, world

MOST_SEEDS = 500


@pytest.mark.parametrize("name", bugs.BUGS)
def test_a_planted_bug_is_found(name):
    for seed in range(MOST_SEEDS):
        try:
            simulate.Simulation(faults.draw(seed), bugs.BUGS[name]).run()
        except world.Violation:
            return
    pytest.fail(f"{MOST_SEEDS} seeds do not show that {name}")
