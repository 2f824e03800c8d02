import pytest

from nebula_jax.parallel import pace


def test_with_no_window_clusters_take_turns():
    assert pace.token_needed(1, window=0) == 0
    assert pace.token_needed(5, window=0) == 4


def test_with_a_window_the_first_steps_need_no_token():
    assert [pace.token_needed(step, window=2) for step in range(1, 6)] == [
        -2, -1, 0, 1, 2,
    ]  # fmt: skip


@pytest.mark.parametrize("window", [0, 1, 2, 5])
@pytest.mark.parametrize("done", [0, 1, 7])
def test_no_generator_can_be_past_the_last_step_when_it_hears_of_it(window, done):
    """A simulation: the generator runs as far as tokens let it; then Stop comes."""
    step = 0
    while pace.token_needed(step + 1, window) <= done:
        step += 1
    assert step <= pace.last_step_after_stop(done, window, total=1000)
    assert step >= pace.last_step_after_stop(done, window, total=1000)


def test_a_stop_near_the_end_changes_nothing():
    assert pace.last_step_after_stop(98, window=5, total=100) == 100
