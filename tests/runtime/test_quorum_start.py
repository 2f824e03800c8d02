"""Where a run with a quorum goes on."""

import types

import pytest
from quorum_star import LIMIT, NAMES

from nebula_jax import errors
from nebula_jax.runtime import connect, local_steps
from nebula_jax.runtime import context as context_lib


def begun(star, number, saved):
    """Returns where a cluster of the star goes on."""
    leaves = star[0].end._leaves.items()
    peers = types.SimpleNamespace(links={name: leaf.link for name, leaf in leaves})
    context = types.SimpleNamespace(
        settings=context_lib.Settings(
            workdir=None,
            cluster=NAMES[number],
            steps=100,
            checkpoint_every=10,
            connection=connect.Settings(connect_timeout=LIMIT),
        )
    )
    end = star[number].end
    made = local_steps.Rounds(context, [star[number].member], end, peers)
    own = types.SimpleNamespace(
        steps=saved,
        newest=max([0, *saved]),
        widen=lambda window: None,
        steps_of_run=lambda step: 100,
    )
    return made.agree_start(own)[0]


@pytest.mark.parametrize("saved", [(5, 9, 13), (9,)])
def test_a_run_goes_on_after_the_newest_step_of_its_hub(star, saved):
    """A leaf may have newer ones: they are of a time that is given up."""
    star = star(is_begun=False, saved=dict.fromkeys(NAMES[1:], saved))
    assert begun(star, 0, (5, 9)) == 9
    assert begun(star, 1, saved) == 9


def test_a_leaf_without_the_hubs_step_goes_on_from_its_own_and_the_state(star):
    star = star(is_begun=False, saved={NAMES[1]: (9,), NAMES[2]: (5, 13)})
    assert begun(star, 0, (5, 9)) == 9
    star[0].step = 9
    star[0].to(10)  # the first look for those that need the state
    assert begun(star, 2, (5, 13)) == 5
    star[2].to(10)
    assert star[2].end.described["from_state"] == 1


def test_a_leaf_whose_checkpoints_are_all_later_begins_behind_the_run(star):
    star = star(is_begun=False, saved={NAMES[1]: (9,), NAMES[2]: (200,)})
    assert begun(star, 0, (9,)) == 9
    star[0].step = 9
    star[0].to(10)
    assert begun(star, 2, (200,)) == 0
    assert [star[number].end.step for number in (0, 2)] == [10, 9]


def test_a_hub_without_checkpoints_does_not_throw_away_a_long_run(star):
    star = star(is_begun=False, saved={NAMES[1]: (10, 20), NAMES[2]: ()})
    with pytest.raises(errors.NebulaError, match="no step is saved in all clusters"):
        begun(star, 0, ())


def test_a_run_that_was_hardly_begun_begins_again(star):
    star = star(is_begun=False, saved={NAMES[1]: (10,), NAMES[2]: ()})
    assert begun(star, 0, ()) == 0
    assert begun(star, 1, (10,)) == 0
