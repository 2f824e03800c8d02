import pytest

from nebula_jax.communication.wire import liveness


def connected(timeout=8.0, now=100.0):
    alive = liveness.Liveness(timeout)
    alive.connected(now)
    return alive


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
