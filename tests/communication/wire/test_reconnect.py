import pytest

from nebula_jax.communication.wire import reconnect


def lost(timeout=10.0, now=100.0):
    policy = reconnect.Reconnect(timeout, b"seed")
    assert policy.lost(now, "it broke", crossed=3, idle_at=0.0)
    return policy


def test_a_lost_connection_is_given_up_after_the_timeout():
    policy = lost()
    assert policy.is_lost
    assert policy.deadline() == 110.0
    assert policy.deadline(limit=5.0) == 105.0
    assert policy.deadline(limit=50.0) == 110.0


def test_an_attempt_that_breaks_half_way_does_not_move_the_deadline():
    policy = lost()
    assert not policy.lost(108.0, "again", crossed=3, idle_at=0.0)
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


def broken_again(crossed, after, waited=0.0):
    policy = lost()
    policy.next_pause()
    policy.next_pause()
    policy.failed("nobody answers")  # which is forgotten then
    assert policy.recovered(104.0) == 4.0
    assert not policy.is_lost
    assert policy.lost(104.0 + after, "damaged", crossed, 104.0 + after - waited)
    return policy


@pytest.mark.parametrize(
    ("after", "waited"), [(2.0, 0.0), (2.0, 90.0), (40.0, 35.0), (40.0, 90.0)]
)
def test_connections_that_carry_nothing_are_no_recovery(after, waited):
    """However long one lasts: a tensor may take longer than what cuts the line lets."""
    policy = broken_again(crossed=3, after=after, waited=waited)
    assert policy.deadline() == 110.0 + after  # 4 of the 10 seconds are gone
    assert policy.next_pause() >= reconnect.FIRST_PAUSE  # as if it had not come back
    assert policy.explanation == (
        "damaged, and no message crossed on any new connection within 10 s"
        " (reconnect_timeout)"
    )


@pytest.mark.parametrize(
    ("crossed", "after", "waited"),
    [(4, 2.0, 2.0), (3, reconnect.LASTING_SECONDS, 0.0), (3, 3600.0, 8.0)],
    ids=["something crossed", "nothing had to", "something had just been sent"],
)
def test_after_a_good_connection_the_clock_starts_anew(crossed, after, waited):
    policy = broken_again(crossed, after, waited)
    assert policy.deadline() == 114.0 + after
    assert policy.next_pause() == 0.0


@pytest.mark.parametrize(
    ("timeout", "expected"),
    [
        (0.0, "it broke"),
        (
            2.5,
            "it broke, and no new connection came about within 2.5 s"
            " (reconnect_timeout): nobody answers",
        ),
    ],
)
def test_the_explanation_names_the_loss_and_the_latest_failure(timeout, expected):
    policy = lost(timeout)
    policy.failed("a certificate")
    policy.failed("nobody answers")
    assert policy.explanation == expected


def test_the_connections_that_came_back_and_their_times_are_counted():
    policy = lost()
    assert policy.outages == 0
    policy.recovered(104.0)
    policy.lost(200.0, "it broke", crossed=9, idle_at=0.0)
    policy.recovered(201.5)
    assert (policy.outages, policy.seconds) == (2, 5.5)


def test_a_line_that_is_back_is_tried_within_five_seconds():
    """An attempt that nobody answers takes 5 s, and knocks after 0, 1 and 3 s."""
    policy = lost(timeout=1000.0)
    for _ in range(50):
        assert (5.0 - 3.0) + policy.next_pause() <= 5.0
