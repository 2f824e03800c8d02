import itertools
import socket
import threading
import time
import types

import pytest
from two_labs import wait_until

from nebula_jax.communication.wire import activity
from nebula_jax.runtime.life import process
from nebula_jax.runtime.ranks import members as members_lib
from nebula_jax.runtime.ranks import rendezvous

STUCK = 0.3  # seconds
LONG = 4 * STUCK
PATIENT = 60.0


@pytest.fixture
def ended(monkeypatch):
    """The exit statuses of this process, which goes on."""
    found = []
    monkeypatch.setattr(members_lib, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(members_lib, "LAST_WORDS_SECONDS", 0.0)
    monkeypatch.setattr(process, "exit_now", found.append)
    return found


@pytest.fixture
def pair(ended):
    """Makes a root, after its first step, and the line of its other process."""
    before, lines = set(threading.enumerate()), []

    def make(peer_timeout=PATIENT, stuck_timeout=PATIENT):
        here, there = map(rendezvous.Line, socket.socketpair())
        root = members_lib.Members(0, peer_timeout)
        root.work = activity.Work(stuck_timeout)
        root.work.begin()
        root.work.step_done()
        root.watch({1: here})
        lines.append((root, here, there))
        return root, there

    yield make
    for root, *both in lines:
        root._has_ended.set()
        for line in both:
            line.close()
    for each in set(threading.enumerate()) - before:
        each.join(20)  # or it would end this process, once `exit_now` is back
        assert not each.is_alive()


def beat(line, places, seconds=LONG):
    """Beats for a while, from another thread: this one must seem to hang."""
    until = time.monotonic() + seconds

    def send():
        for place in places:
            if time.monotonic() > until:
                return
            line.send({"done": 1, "at": place})
            time.sleep(0.02)

    sender = threading.Thread(target=send)
    sender.start()
    sender.join()


def test_a_cluster_that_does_not_move_ends_with_every_place(ended, pair):
    root, line = pair(stuck_timeout=STUCK)
    reasons = []
    root.aborts.append(reasons.append)
    beat(line, itertools.repeat("a.py:7"))
    wait_until(lambda: ended)
    assert ended == [process.ENDED_BY_PEER]
    (reason,) = reasons
    assert reason.startswith("this cluster got nothing done for 0.3 s (stuck_timeout")
    assert "since step 1: process 0 at tests/" in reason
    assert reason.endswith("; process 1 at a.py:7")
    assert root.reason == reason


def test_one_that_moves_within_a_step_is_waited_for(ended, pair):
    root, line = pair(stuck_timeout=2.0)
    beat(line, (f"a.py:{number}" for number in itertools.count()), seconds=3.0)
    assert not ended
    root.fail("the test is over")
    while "end" not in (message := line.read(5)):
        pass
    assert message["end"] == "process 0 failed: the test is over"


def test_who_waits_for_another_cluster_is_not_stuck(ended, pair):
    root, line = pair(stuck_timeout=STUCK)
    root.work.waiting.append("tokens")
    beat(line, itertools.repeat("a.py:7"))
    assert not ended
    root.fail("")


def test_all_leave_together(ended, pair):
    root, line = pair()
    begin = time.monotonic()
    threading.Timer(STUCK / 2, line.send, [{"leave": True}]).start()
    root.leave()
    assert time.monotonic() - begin >= STUCK / 2
    while "leave" not in line.read(5):
        pass
    line.close()
    time.sleep(0.1)
    assert not ended
    assert not root.reason


def test_a_process_that_stood_still_itself_finds_nobody_silent(
    ended, pair, monkeypatch
):
    """It was paused, all others with it, and has read nothing since."""
    root, _ = pair(peer_timeout=PATIENT, stuck_timeout=PATIENT)
    monkeypatch.setattr(members_lib, "STANDSTILL_SECONDS", 5.0)
    root._has_ended.set()  # its own beats
    for late, is_silent in ((4 * PATIENT, False), (0.0, True)):
        for times in (root._heard, root._moved):
            times |= dict.fromkeys(times, time.monotonic() - 3 * PATIENT)
        root._since = time.monotonic() - 3 * PATIENT
        root._has_ended.clear()
        root._forgive(late)
        root._check(root.work.report(is_waited_for=False))
        assert bool(ended) == is_silent
        root._has_ended.set()


def test_a_process_ends_though_nobody_reads_its_output(monkeypatch):
    def broken():
        raise BrokenPipeError

    found = []
    for name in ("stdout", "stderr"):
        stream = types.SimpleNamespace(flush=broken)
        monkeypatch.setattr(process.sys, name, stream)
    monkeypatch.setattr(process.os, "_exit", found.append)
    process.exit_now(4)
    monkeypatch.undo()
    assert found == [4]
