"""Peers that live and get nothing done: real sockets, short timeouts."""

import concurrent.futures
import contextlib
import threading

import jax
import numpy as np
import pytest

from nebula_jax.communication import bridge, codec
from nebula_jax.communication import listener as listener_lib
from nebula_jax.communication.wire import activity, frames, session
from nebula_jax.communication.wire.activity import Activity

SPEC = jax.ShapeDtypeStruct((8,), np.int32)
IDS = np.arange(8, dtype=np.int32)
PEER_TIMEOUT = 0.4  # seconds: a Ping every tenth of a second


@pytest.fixture
def pool():
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        yield pool


class Star:
    """A discriminator and its generators, each a process as far as links can see."""

    def __init__(self, stack, pool, timeouts):
        discriminator, *generators = [activity.Work(each) for each in timeouts]
        settings = {"peer_timeout": PEER_TIMEOUT, "reconnect_timeout": 5.0, "tls": None}
        listener = stack.enter_context(
            listener_lib.Listener(
                listener_lib.listen(("127.0.0.1", 0)),
                frames.Hello("discriminator", "0.1", {}),
                work=discriminator,
                **settings,
            )
        )
        self.here, self.there = [], []
        for index, work in enumerate(generators):
            coming = pool.submit(
                bridge.connect,
                listener.address,
                frames.Hello(f"generator:{index}", "0.1", {}),
                connect_timeout=5.0,
                peer="discriminator",
                work=work,
                **settings,
            )
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
            here.welcome(0)
            there.wait_for_welcome(5.0)
            stack.callback(there.abort, "the test is over")
            stack.callback(here.abort, "the test is over")


@pytest.fixture
def star(pool):
    with contextlib.ExitStack() as stack:
        yield lambda *timeouts: Star(stack, pool, timeouts)


def test_a_peer_that_pings_and_computes_nothing_is_given_up_and_named(star):
    star = star(0.5, 5.0)
    with pytest.raises(session.PeerGone) as caught:
        star.receivers[0].recv(1)
    assert "discriminator has waited" in str(caught.value)
    assert "for tokens of step 1, micro-batch 0 from generator:0" in str(caught.value)
    assert "which reports that it is computing" in str(caught.value)
    assert "(--stuck_timeout: 0.5 s)" in str(caught.value)


def test_a_peer_that_saves_is_waited_for_and_so_is_one_whose_steps_are_done(star, pool):
    star = star(0.4, 5.0)
    work = star.there[0].work
    arrived = pool.submit(star.receivers[0].recv, 1)
    never = threading.Event()
    with work.busy(Activity.SAVING):
        never.wait(1.0)
        assert star.here[0].peer_activity is Activity.SAVING
    for _ in range(5):
        never.wait(0.15)
        work.step_done()
    star.senders[0].send(1, IDS)
    np.testing.assert_array_equal(arrived.result(5.0), IDS)


def test_who_waits_for_one_that_waits_for_the_stuck_one_does_not_end_first(star, pool):
    """Generator 1 has the least patience, and yet blames nobody wrongly."""
    star = star(0.8, 5.0, 0.2)
    waits = pool.submit(star.there[1].wait_for_step, 1)
    with pytest.raises(session.PeerStuck, match="from generator:0, which") as caught:
        star.receivers[0].recv(1)
    assert star.there[1].peer_activity is Activity.WAITING_FOR_ANOTHER
    star.here[1].abort(str(caught.value))  # as the end of its block would
    with pytest.raises(session.PeerAborted, match="gave up: discriminator has waited"):
        waits.result(5.0)


def test_a_peer_that_never_says_goodbye_is_given_up_as_well(star):
    star = star(0.4, 5.0)
    with pytest.raises(session.PeerStuck, match="the end of the session from genera"):
        star.here[0].close()
    assert star.here[0].is_over
