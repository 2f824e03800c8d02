"""Each planted bug is found: else the simulation would prove nothing."""

import pytest

from tests.simulation import bugs, faults, shrink

SOONEST = {
    "a frame is acknowledged before it was handed over": 77,
    "no attempt follows one that failed": 32,
    "nothing is sent while there is nothing to send": 1,
    "a checksum is not compared": 45,
    "a checkpoint is not flushed before it counts": 106,
    "a damaged checkpoint counts": 18,
    "clusters go on from the newest step of any": 2,
    "who is dropped stays open": 55,
    "the last step is one too early": 21,
    "what waits to be taken has no bound": 61,
}
"""Bug -> a seed that shows it soon, and is tried first."""


@pytest.mark.parametrize("name", bugs.BUGS)
def test_a_planted_bug_is_found(name):
    bug = bugs.BUGS[name]
    soonest = shrink.violation(faults.draw(SOONEST.get(name, 0)), bug)
    assert soonest or shrink.first_seed(bug) is not None
