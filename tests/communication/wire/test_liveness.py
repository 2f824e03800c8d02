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
