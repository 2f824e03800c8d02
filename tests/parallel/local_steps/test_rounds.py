"""Rounds in a loop: which are left at the end of a run."""

import pytest

from nebula_jax.parallel.local_steps import rounds
from nebula_jax.training import diloco

CONFIG = diloco.Config(inner_steps=8, fragments=2, delay=3)


@pytest.mark.parametrize(
    ("step", "last"),
    [
        (3, [(3, 0), (3, 1)]),
        (4, [(4, 1), (4, 0)]),  # the one of fragment 1 is under way
        (6, [(4, 1), (6, 0), (6, 1)]),
        (7, [(7, 0), (7, 1)]),  # it was applied after this step
        (8, [(8, 0), (8, 1)]),
        (10, [(8, 0), (10, 0), (10, 1)]),
    ],
)
def test_at_the_end_each_fragment_has_a_last_round(step, last):
    assert rounds.last_rounds(CONFIG, step) == last


def test_without_delay_the_round_of_the_last_step_is_applied_already():
    config = diloco.Config(inner_steps=8, fragments=2)
    assert rounds.last_rounds(config, 8) == [(8, 1)]
    assert rounds.last_rounds(config, 9) == [(9, 0), (9, 1)]
