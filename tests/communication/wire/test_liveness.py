import pytest

from nebula_jax.communication.wire import liveness
from nebula_jax.communication.wire.activity import Activity, Report


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


PEER_TIMEOUT, STUCK_TIMEOUT = 8.0, 60.0


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
    found = liveness.Watch(PEER_TIMEOUT)
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
