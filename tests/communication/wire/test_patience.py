import time

import pytest

from nebula_jax.communication.wire import activity, patience, session, states
from nebula_jax.communication.wire.activity import Activity

PEER_TIMEOUT = 10.0


def meet(doing):
    found = session.Session(states.Role.LISTENER, bytes(16), PEER_TIMEOUT)
    found.peer = "generator:0"
    found.watch.connected(1000.0)
    found.watch.pinged(activity.Report(doing, 0), 0, 1000.0)
    return found


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def wait(doing, seconds):
    """Waits so long for a peer that reports what it is doing; checks at the end."""
    peer, clock = meet(doing), Clock()
    waiting = patience.Patience(
        "discriminator",
        "tokens of step 41, micro-batch 0",
        peer,
        activity.Work(60.0),
        clock,
    )
    while clock.now < 1000.0 + seconds:
        clock.now += 5.0
        peer.watch.pinged(activity.Report(doing, 0), 0, clock.now)
    waiting.check()


def test_the_error_names_who_waits_for_whom_for_what_and_since_when():
    start = time.time()
    wait(Activity.COMPUTING, 55.0)
    with pytest.raises(session.PeerGone) as caught:
        wait(Activity.COMPUTING, 120.0)
    since = {
        time.strftime("%H:%M:%S", time.localtime(start - 120.0 + late))
        for late in range(4)
    }
    text, _, rest = str(caught.value).partition("; nothing but signs of life came")
    assert text == (
        "discriminator has waited 120 s for tokens of step 41, micro-batch 0 from"
        " generator:0, which reports that it is computing"
    )
    assert any(rest == f" since {each} (--stuck_timeout: 60 s)" for each in since)


def test_a_peer_that_saves_is_given_ten_times_as_long_and_no_more():
    wait(Activity.SAVING, 595.0)
    with pytest.raises(session.PeerStuck, match="60 s, 10 times that for one that is"):
        wait(Activity.SAVING, 600.0)


def test_two_clusters_that_wait_for_each_other_are_named():
    with pytest.raises(session.PeerStuck, match="that it is waiting for discriminator"):
        wait(Activity.WAITING, 60.0)
