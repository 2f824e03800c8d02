"""Peers that get nothing done, lines that are down: real sockets, short timeouts."""

import threading

import jax
import links
import numpy as np
import pytest
from two_labs import wait_until

from nebula_jax import errors
from nebula_jax.communication import codec
from nebula_jax.communication import link as link_lib
from nebula_jax.communication.wire import activity, session, stuck_peers
from nebula_jax.communication.wire.activity import Activity

SPEC = jax.ShapeDtypeStruct((8,), np.int32)
IDS = np.arange(8, dtype=np.int32)
PEER_TIMEOUT = 0.4  # seconds: a Ping every tenth of a second


class Star:
    """A discriminator and its generators, each a process as far as links can see."""

    def __init__(self, stack, pool, timeouts):
        discriminator, *generators = [activity.Work(each) for each in timeouts]
        settings = {"peer_timeout": PEER_TIMEOUT, "reconnect_timeout": 5.0}
        listener = stack.enter_context(links.listening(work=discriminator, **settings))
        self.here, self.there = [], []
        for index, work in enumerate(generators):
            name, more = f"generator:{index}", settings | {"work": work}
            coming = pool.submit(links.dial, listener.address, name, **more)
            self.here.append(listener.accept(5.0))
            self.there.append(coming.result(5.0))
        for work in (discriminator, *generators):
            work.begin()
            work.step_done()
        self.receivers = [
            link.receiver("tokens", SPEC, codec.identity()) for link in self.here
        ]
        self.senders = [
            link.sender("tokens", SPEC, codec.identity()) for link in self.there
        ]
        for here, there in zip(self.here, self.there, strict=True):
            links.begin(here, there)
            stack.callback(there.abort, "the test is over")
            stack.callback(here.abort, "the test is over")


@pytest.fixture
def star(pool, stack):
    return lambda *timeouts: Star(stack, pool, timeouts)


def test_a_peer_that_pings_and_computes_nothing_is_given_up_and_named(star):
    star = star(0.5, 5.0)
    with pytest.raises(session.PeerGone) as caught:
        star.receivers[0].recv(1)
    assert "discriminator has waited" in str(caught.value)
    assert "for tokens of step 1, micro-batch 0 from generator:0" in str(caught.value)
    assert "which reports that it is computing" in str(caught.value)
    assert "(stuck_timeout: 0.5 s)" in str(caught.value)


WAITS = {
    "tensor": lambda pair: pair.here.take_tensor(0),
    "token": lambda pair: pair.there.wait_for_step(1),
    "end": lambda pair: pair.there.close(),
}


@pytest.mark.parametrize("wait", WAITS)
def test_a_process_that_is_to_stop_ends_any_wait_for_a_peer_that_is_lost(
    stack, monkeypatch, wait
):
    monkeypatch.setattr(link_lib, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(link_lib, "LOST_SECONDS", 0.2)
    pair = links.Pair(stack, breaks=True, reconnect_timeout=600.0)
    links.channel(pair.there, pair.here, "tokens", SPEC)
    pair.begin()
    asked = []

    def on_lost(peer):
        asked.append(peer)
        if len(asked) == 3:  # asked until the process is to stop
            raise errors.NebulaError(f"stopped while it waited for {peer}")

    pair.here.work.on_lost = pair.there.work.on_lost = on_lost
    pair.proxy.go_down()
    with pytest.raises(errors.NebulaError, match="stopped while it waited for"):
        WAITS[wait](pair)
    pair.proxy.close()


def test_a_peer_that_saves_is_waited_for_and_so_is_one_whose_steps_are_done(star, pool):
    star = star(0.4, 5.0)
    work = star.there[0].work
    arrived = pool.submit(star.receivers[0].recv, 1)
    never = threading.Event()
    with work.busy(Activity.SAVING):
        never.wait(1.0)
        assert star.here[0]._session.watch.activity is Activity.SAVING
    for _ in range(5):
        never.wait(0.15)
        work.step_done()
    star.senders[0].send(1, IDS)
    np.testing.assert_array_equal(arrived.result(5.0), IDS)


def test_who_waits_for_one_that_waits_for_the_stuck_one_does_not_end_first(star, pool):
    """Generator 1 has the least patience, and yet blames nobody wrongly."""
    star = star(3.0, 9.0, 1.0)
    waits = pool.submit(star.there[1].wait_for_step, 1)
    receives = pool.submit(star.receivers[0].recv, 1)
    watch = star.there[1]._session.watch
    wait_until(lambda: watch.activity is Activity.WAITING_FOR_ANOTHER)
    with pytest.raises(stuck_peers.PeerStuck, match="from generator:0") as caught:
        receives.result(20.0)
    star.here[1].abort(str(caught.value))  # as the end of its block would
    with pytest.raises(session.PeerAborted, match="gave up: discriminator has waited"):
        waits.result(5.0)


def test_a_peer_that_never_says_goodbye_is_given_up_as_well(star):
    star = star(0.4, 5.0)
    with pytest.raises(stuck_peers.PeerStuck, match="the end of the session"):
        star.here[0].close()
    assert star.here[0].is_over


def test_whatever_comes_first_ends_the_wait_for_any(star, pool):
    star = star(5.0, 5.0)
    here, there = star.here[0], star.there[0]
    waits = pool.submit(here.wait_for_any, "something")
    while not here.work.waiting:
        pass
    assert here.arrived(0) is None
    star.senders[0].send(3, IDS)
    assert waits.result(5.0)
    assert here.arrived(0).step == 3
    assert here.wait_for_any("it is there already")
    star.receivers[0].recv(3)
    closing = pool.submit(there.close)
    assert not here.wait_for_any("what does not come")  # but End
    assert here.control.has_ended
    here.close()
    closing.result(5.0)
