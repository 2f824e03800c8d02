import pytest

from nebula_jax.communication.wire import reconnect


def lost(timeout=10.0, now=100.0):
    policy = reconnect.Reconnect(timeout, b"seed")
    assert policy.lost(now, "it broke")
    return policy


def test_a_connection_is_never_given_up():
    policy = reconnect.Reconnect(10.0, b"seed")
    assert not policy.is_lost
    assert policy.deadline() == float("inf")


def test_a_lost_connection_is_given_up_after_the_timeout():
    policy = lost()
    assert policy.is_lost
    assert policy.deadline() == 110.0
    assert policy.deadline(limit=5.0) == 105.0
    assert policy.deadline(limit=50.0) == 110.0


def test_an_attempt_that_breaks_half_way_does_not_move_the_deadline():
    policy = lost()
    assert not policy.lost(108.0, "again")
    assert policy.deadline() == 110.0
    assert policy.explanation.startswith("it broke, and no new connection")


def test_the_first_attempt_is_at_once_and_pauses_grow_to_a_limit():
    policy = lost()
    assert policy.next_pause() == 0.0
    longest = reconnect.FIRST_PAUSE
    for _ in range(20):
        assert longest / 2 <= policy.next_pause() <= longest
        longest = min(2 * longest, reconnect.LONGEST_PAUSE)
    assert longest == reconnect.LONGEST_PAUSE


def test_pauses_of_two_sessions_differ():
    pauses = []
    for seed in (b"one", b"two"):
        policy = reconnect.Reconnect(10.0, seed)
        pauses.append([policy.next_pause() for _ in range(4)])
    assert pauses[0][1:] != pauses[1][1:]


def test_a_connection_that_comes_back_forgets_everything():
    policy = lost()
    policy.next_pause()
    policy.failed("nobody answers")
    assert policy.recovered(103.5) == 3.5
    assert not policy.is_lost
    assert policy.lost(200.0, "once more")
    assert policy.deadline() == 210.0
    assert policy.next_pause() == 0.0
    assert "nobody answers" not in policy.explanation


@pytest.mark.parametrize(
    ("timeout", "expected"),
    [
        (0.0, "it broke"),
        (
            2.5,
            "it broke, and no new connection came about within 2.5 s"
            " (--reconnect_timeout): nobody answers",
        ),
    ],
)
def test_the_explanation_names_the_loss_and_the_latest_failure(timeout, expected):
    policy = lost(timeout)
    policy.failed("a certificate")
    policy.failed("nobody answers")
    assert policy.explanation == expected
