import pytest

from nebula_jax.communication.wire import liveness


def connected(timeout=8.0, now=100.0):
    alive = liveness.Liveness(timeout)
    alive.connected(now)
    return alive


def test_pings_are_due_a_quarter_of_the_timeout_after_the_last_frame():
    alive = connected()
    assert not alive.needs_ping(101.9)
    assert alive.needs_ping(102.0)
    alive.sent(102.0)
    assert not alive.needs_ping(103.9)


def test_a_peer_is_gone_once_it_was_silent_for_the_timeout():
    alive = connected()
    assert not alive.timed_out(107.9)
    assert alive.timed_out(108.0)
    alive.received(107.0)
    assert alive.silence(110.0) == 3.0
    assert not alive.timed_out(114.9)
    assert alive.timed_out(115.0)


@pytest.mark.parametrize(
    ("timeout", "noted"), [(30.0, 10.0), (90.0, 30.0), (12.0, 10.0), (8.0, 8.0)]
)
def test_a_silence_is_noted_once_and_its_end_with_its_length(timeout, noted):
    """Ten seconds, but no sooner than a Ping must have come."""
    alive = connected(timeout)
    assert alive.next_check(100.0, pings=False) == noted
    assert not alive.is_late(100.0 + noted - 0.1)
    assert alive.is_late(100.0 + noted)
    alive.is_noted = True
    assert not alive.is_late(100.0 + noted)
    assert alive.next_check(100.0, pings=False) == timeout
    assert not alive.ended()
    alive.received(100.0 + noted + 2.5)
    assert alive.ended() == noted + 2.5
    assert not alive.ended()
    assert not alive.is_late(100.0 + 2 * noted)
    assert alive.is_late(102.5 + 2 * noted)


def test_a_lost_connection_ends_a_silence_without_a_word():
    alive = connected(30.0)
    alive.is_noted = True
    alive.lost()
    alive.connected(140.0)
    assert not alive.ended()


def test_sending_does_not_make_the_peer_alive():
    alive = connected()
    alive.sent(107.0)
    assert alive.timed_out(108.0)


def test_the_next_check_is_the_earlier_of_both():
    alive = connected()
    assert alive.next_check(100.5, pings=True) == 1.5
    assert alive.next_check(100.5, pings=False) == 7.5
    alive.sent(107.0)
    assert alive.next_check(107.0, pings=True) == 1.0
    assert alive.next_check(120.0, pings=True) == 0.0


def test_a_new_connection_starts_anew():
    alive = connected()
    alive.connected(200.0)
    assert not alive.timed_out(207.9)
    assert not alive.needs_ping(201.9)
