import time

import clocks
import pytest

from nebula_jax.communication.wire import activity, session, stuck_peers
from nebula_jax.communication.wire.activity import Activity, Report

PEER_TIMEOUT, STUCK_TIMEOUT = 8.0, 60.0


def begun(watch, clock):
    return stuck_peers.Wait(
        "discriminator",
        "tokens of step 41, micro-batch 0",
        "generator:0",
        watch,
        activity.Work(STUCK_TIMEOUT),
        clock,
    )


def wait(doing, seconds):
    """Waits so long for a peer that reports what it is doing; checks at the end."""
    watch, clock = stuck_peers.Watch(10.0), clocks.Clock(1000.0)
    watch.connected(1000.0)
    watch.pinged(Report(doing, 0), 0, 1000.0)
    waiting = begun(watch, clock)
    while clock.now < 1000.0 + seconds:
        clock.now += 5.0
        watch.pinged(Report(doing, 0), 0, clock.now)
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
    assert any(rest == f" since {each} (stuck_timeout: 60 s)" for each in since)


def test_a_wait_sleeps_for_what_is_left_of_its_time_and_no_longer():
    clock = clocks.Clock(1000.0)
    begin = clock.now
    waiting = begun(stuck_peers.Watch(10.0), clock)
    for seconds, left in ((0.0, 5.0), (3.0, 2.0), (9.0, 0.0)):
        clock.now = begin + seconds
        assert waiting.pause(timeout=5.0) == left


def test_a_peer_that_saves_is_given_ten_times_as_long_and_no_more():
    wait(Activity.SAVING, 595.0)
    with pytest.raises(stuck_peers.PeerStuck, match="60 s, 10 times that for one that"):
        wait(Activity.SAVING, 600.0)


def test_two_clusters_that_wait_for_each_other_are_named():
    with pytest.raises(stuck_peers.PeerStuck, match="is waiting for discriminator"):
        wait(Activity.WAITING, 60.0)


class Wait:
    """A wait for a peer from `now` on; Pings come every two seconds."""

    def __init__(self, watch, now=100.0):
        self.watch, self.now = watch, now
        self.begin = watch.count(now)

    def ping(self, seconds, doing=Activity.COMPUTING, done=0, received=0):
        """Pings for so many seconds; returns whether the last one convicts."""
        for _ in range(int(seconds / 2)):
            self.now += 2.0
            self.watch.pinged(Report(doing, done), received, self.now)
        return self.is_stuck()

    def is_stuck(self):
        return self.watch.is_stuck(self.begin, STUCK_TIMEOUT)


@pytest.fixture
def watch():
    found = stuck_peers.Watch(PEER_TIMEOUT)
    found.connected(100.0)
    found.pinged(Report(Activity.COMPUTING, 0), 0, 100.0)
    return found


@pytest.mark.parametrize(
    ("doing", "limit"),
    [
        (Activity.COMPUTING, 60.0),
        (Activity.WAITING, 60.0),  # for the one who waits for it
        (Activity.SAVING, 600.0),
        (Activity.STARTING, 600.0),
        (Activity.EVALUATING, 600.0),
    ],
)
def test_a_peer_that_only_pings_is_stuck_after_what_its_activity_is_given(
    watch, doing, limit
):
    watch.pinged(Report(doing, 0), 0, 100.0)
    wait = Wait(watch)
    assert not wait.ping(limit - 2, doing)
    assert wait.ping(2, doing)
    assert watch.limit(STUCK_TIMEOUT) == limit
    assert watch.progressed == 100.0


def test_a_peer_that_waits_for_a_third_is_left_to_its_own_watch(watch):
    wait = Wait(watch)
    assert not wait.ping(10_000, Activity.WAITING_FOR_ANOTHER)
    assert not wait.ping(60, Activity.COMPUTING)
    assert wait.ping(2, Activity.COMPUTING)


@pytest.mark.parametrize(
    "news", [{"done": 1}, {"received": 1}, {"doing": Activity.WAITING}]
)
def test_what_a_peer_has_done_or_received_is_progress_once(watch, news):
    wait = Wait(watch)
    assert not wait.ping(58)
    assert not wait.ping(60, **news)  # the first of these Pings has news
    assert wait.ping(2, **news)


def test_bytes_of_messages_are_progress_and_those_of_pings_are_not(watch):
    wait = Wait(watch)
    wait.ping(58)
    watch.moved(1000, wait.now)
    assert not wait.ping(58)
    watch.moved(1000, wait.now)  # a whole Ping adds nothing
    assert wait.ping(2)


def test_a_peer_reads_nothing_while_its_pings_report_no_more_bytes(watch):
    """Unless it waits for this side: then it has room, and the line brings nothing."""
    wait = Wait(watch)
    assert not wait.ping(2, Activity.EVALUATING, received=8)
    assert not watch.reads_nothing
    wait.ping(2, Activity.EVALUATING, received=8)
    assert watch.reads_nothing
    wait.ping(2, Activity.WAITING, received=8)
    assert not watch.reads_nothing
    wait.ping(2, Activity.WAITING_FOR_ANOTHER, received=8)
    assert watch.reads_nothing
    watch.connected(wait.now)  # of a new connection nothing is known yet
    assert not watch.reads_nothing


def test_what_a_peer_did_before_anybody_waited_for_it_does_not_count(watch):
    Wait(watch).ping(1000)
    wait = Wait(watch, 1100.0)
    assert not wait.ping(58)
    assert wait.ping(2)


def test_only_a_ping_convicts_and_by_what_it_reports(watch):
    wait = Wait(watch)
    assert not wait.ping(58)
    wait.now += 5.0
    assert not wait.is_stuck()
    assert not wait.ping(2, Activity.SAVING)
    assert not wait.ping(598, Activity.SAVING)
    assert not wait.ping(2, Activity.COMPUTING)  # saved: that is something


def test_time_without_a_connection_does_not_count(watch):
    wait = Wait(watch)
    assert not wait.ping(50)
    wait.now += 1000.0
    watch.connected(wait.now)
    assert not wait.ping(8)
    assert wait.ping(2)


def test_time_in_which_this_side_stood_still_does_not_count(watch):
    wait = Wait(watch)
    assert not wait.ping(40)
    wait.now += 1000.0  # as SIGSTOP would have it
    assert not wait.ping(2)  # counts as PEER_TIMEOUT
    assert not wait.ping(10)
    assert wait.ping(2)
