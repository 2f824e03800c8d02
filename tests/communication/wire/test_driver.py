"""Exactly once, across reconnects: real sockets, and a line that breaks on purpose."""

import concurrent.futures
import contextlib
import functools
import random
import socket
import threading
import time

import jax
import jax.numpy as jnp
import links
import numpy as np
import pytest
from two_labs import wait_until

from nebula_jax import errors
from nebula_jax.communication import wan
from nebula_jax.communication.wire import driver, frames, reconnect, session
from nebula_jax.security import tls

SPEC = jax.ShapeDtypeStruct((40_000,), jnp.float32)


def value(step, side):
    return np.random.RandomState(2 * step + side).randn(40_000).astype(np.float32)


class Line(links.Pair):
    """Both links, the proxy between them, and what they told the log."""

    def __init__(self, stack, **settings):
        self.said = []
        settings = {"reconnect_timeout": 20.0, "log": self.said.append} | settings
        super().__init__(stack, breaks=True, **settings)

    @contextlib.contextmanager
    def breaking(self, least, most):
        """Cuts it again and again, after so many seconds, for as long as the block."""
        is_done, rng = threading.Event(), random.Random(0)

        def break_it():
            while not is_done.wait(rng.uniform(least, most)):
                self.proxy.cut()

        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            breaking = thread.submit(break_it)
            try:
                yield
            finally:
                is_done.set()
                breaking.result()

    def talk(self, pool, steps, disturb):
        """Tensors both ways and step tokens, while `disturb(step)` does its worst."""
        outgoing, incoming = links.channel(self.there, self.here, "up", SPEC)
        reply, back = links.channel(self.here, self.there, "down", SPEC)

        def connector():
            with self.there:
                self.there.wait_for_welcome(5.0)
                for step in range(1, steps + 1):
                    outgoing.send(step, value(step, 0))
                    if step > 2:
                        np.testing.assert_array_equal(
                            back.recv(step - 2), value(step - 2, 1)
                        )
                    self.there.wait_for_step(step - 2)
                for step in (steps - 1, steps):
                    np.testing.assert_array_equal(back.recv(step), value(step, 1))

        far = pool.submit(connector)
        with self.here:
            self.here.welcome(0)
            for step in range(1, steps + 1):
                disturb(step)
                np.testing.assert_array_equal(incoming.recv(step), value(step, 0))
                reply.send(step, value(step, 1))
                self.here.step_done(step)
        far.result(30.0)


@pytest.fixture
def line(stack):
    return functools.partial(Line, stack)


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "tls"])
def test_nothing_is_lost_doubled_or_reordered_when_the_line_breaks(
    tmp_path, line, pool, encrypted
):
    server, client = links.credentials(tmp_path, encrypted)
    line = line(server=server, client=client)
    with line.breaking(0.1, 0.5):
        line.talk(pool, 40, lambda step: time.sleep(0.06))
    assert line.proxy.connections > 3
    assert any("waiting for it to come back" in said for said in line.said)
    assert any("is back after" in said for said in line.said)
    received = line.here.ledger["received up"][0]
    assert received == 40  # what came twice in part was whole once


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_line_that_damages_every_tensor_is_given_up_and_not_dialed_hot(
    line, pool, direction
):
    line = line(reconnect_timeout=1.5)
    sender, receiver = line.there, line.here
    if direction == "down":
        sender, receiver = receiver, sender
    sending, incoming = links.channel(sender, receiver, "h", SPEC)
    line.begin()
    line.proxy.flip(10_000, direction)  # a tensor has 160,000 bytes
    start = time.monotonic()
    sending.send(1, value(1, 0))
    waiting = pool.submit(incoming.recv, 1)
    with pytest.raises(errors.NebulaError, match="reconnect_timeout"):
        sender.wait_for_step(1)
    with pytest.raises(errors.NebulaError, match=r"damaged|gave up"):
        waiting.result(10.0)
    assert time.monotonic() - start < 15.0
    assert line.proxy.connections < 12


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "tls"])
def test_a_slow_line_that_still_moves_is_never_cut_off(tmp_path, line, pool, encrypted):
    server, client = links.credentials(tmp_path, encrypted)
    line = line(peer_timeout=1.5, server=server, client=client)

    def disturb(step):
        if step == 2:
            line.proxy.limit(80_000)  # a tensor takes two seconds

    line.talk(pool, 3, disturb)
    assert line.proxy.connections == 1


def test_a_cut_of_the_emulated_line_is_survived(line, pool):
    lines = wan.from_string("50mbit,1ms,cut=1.5s@0.2s")
    line = line(
        peer_timeout=0.5, server={"line": lines.down}, client={"line": lines.up}
    )
    line.talk(pool, 12, lambda step: time.sleep(0.03))
    assert line.proxy.connections > 1


def test_a_line_that_stays_broken_ends_both_sides_in_words(line, pool):
    line = line(reconnect_timeout=0.6)
    line.begin()
    line.proxy.go_down()
    start = time.monotonic()
    words = r"no new connection came about within 0\.6 s \(reconnect_timeout\)"
    waiting = pool.submit(line.there.wait_for_step, 1)
    with pytest.raises(session.PeerGone, match=f"generator:0.* {words}"):
        line.here.wait_for_step(1)
    with pytest.raises(session.PeerGone, match=f"discriminator.* {words}"):
        waiting.result(5.0)
    assert time.monotonic() - start < 15.0


def test_a_listener_that_was_started_anew_says_so(line, pool):
    line = line()
    line.begin()
    line.listener._sessions.clear()
    line.proxy.cut()
    with pytest.raises(session.PeerAborted, match=r"this session: .* Then start the"):
        line.there.wait_for_step(1)
    line.here.abort("done")


@pytest.mark.parametrize(
    ("encrypted", "epoch", "words"),
    [
        (True, 2, "came back with another certificate"),
        (False, 1, "opened connection 1 of a session at connection 1"),
    ],
    ids=["another certificate", "an older connection"],
)
def test_who_cannot_be_the_peer_does_not_take_its_session(
    tmp_path, line, encrypted, epoch, words
):
    server, client = links.credentials(tmp_path, encrypted)
    line = line(server=server, client=client)
    line.begin()
    opening = frames.encode(frames.Open(line.there.session_id, epoch), 0, 1)
    with socket.create_connection(line.listener.address) as thief:
        if encrypted:
            context = tls.client_contexts(tmp_path / "generator-1")()
            thief = context.wrap_socket(thief, server_hostname="discriminator")
        thief.sendall(opening[0])
        assert thief.recv(100) == b""
        thief.close()
    assert any(words in said for said in line.said)
    line.here.step_done(1)
    line.there.wait_for_step(1)
    assert line.proxy.connections == 1


def test_what_was_read_when_the_break_was_noticed_is_not_lost(line, pool):
    """Both sides send and receive at once, so that writes notice breaks too."""
    line = line()
    channels = [
        (size, *links.channel(*ways, str(size), jax.ShapeDtypeStruct((size,), "uint8")))
        for ways in [(line.here, line.there), (line.there, line.here)]
        for size in (8, 300_000)
    ]
    line.begin()

    def send(channels):
        for step in range(150):
            for size, sender, _ in channels:
                sender.send(step, np.full(size, step, np.uint8))

    def receive(channels):
        for step in range(150):
            for _, _, receiver in channels:
                assert np.all(np.asarray(receiver.recv(step)) == step)

    with line.breaking(0.01, 0.1):
        ways = channels[:2], channels[2:]
        talking = [pool.submit(do, way) for way in ways for do in (send, receive)]
        for each in talking:
            each.result(60.0)
    closing = pool.submit(line.there.close)
    line.here.close()
    closing.result(10.0)
    assert line.proxy.connections > 2


def test_a_side_that_reads_nothing_for_long_is_not_given_up_by_who_sends(
    line, pool, monkeypatch
):
    """As while it evaluates: its inbox is full, and the line breaks now and then."""
    monkeypatch.setattr(reconnect, "LASTING_SECONDS", 0.2)
    monkeypatch.setattr(reconnect, "LONGEST_PAUSE", 0.1)
    line = line(peer_timeout=0.4, reconnect_timeout=1.0)
    outgoing, incoming = links.channel(line.there, line.here, "h", SPEC)
    line.begin()
    big = 160  # tensors: more than both sides and the sockets between them keep

    def send():
        for step in range(big):
            outgoing.send(step, value(step, 0))

    sending = pool.submit(send)
    for _ in range(3):
        time.sleep(0.6)
        line.proxy.go_down()
        time.sleep(0.5)  # in all, more than the session may be without a connection
        line.proxy.refuse(False)
        while line.there.is_away and not line.there.is_over:
            time.sleep(0.01)
    for step in range(big):
        np.testing.assert_array_equal(incoming.recv(step), value(step, 0))
    sending.result(5.0)


def test_who_gives_up_right_after_the_welcome_is_heard(line):
    line = line()
    line.here.welcome(0)
    line.here.abort("cannot restore the checkpoint")

    def go_on():
        line.there.wait_for_welcome(5.0)
        line.there.wait_for_step(1)

    with pytest.raises(session.PeerAborted, match="cannot restore the checkpoint"):
        go_on()


def test_who_comes_back_to_an_ended_session_hears_why_it_ended(line):
    line = line()
    line.begin()
    line.proxy.go_down()
    time.sleep(0.2)
    line.here.abort("disk full")
    line.proxy.refuse(False)
    with pytest.raises(session.PeerAborted, match="disk full"):
        line.there.wait_for_step(1)


@pytest.mark.parametrize("ending", ["close", "abort", "gone"])
def test_no_thread_is_left_behind(line, pool, ending):
    line = line(reconnect_timeout=0.3)
    line.begin()
    if ending == "close":
        closing = pool.submit(line.there.close)
        line.here.close()
        closing.result(5.0)
    elif ending == "abort":
        line.here.abort("enough")
        line.there.abort("enough")
    else:
        line.proxy.go_down()
    for link in (line.here, line.there):
        link._driver._thread.join(5.0)
        assert not link._driver._thread.is_alive()
        assert link.is_over


def test_closing_before_the_run_began_ends_both_sides(line, pool):
    line = line(peer_timeout=1.0)
    line.here.welcome(0)
    wait_until(lambda: line.there.control.welcome is not None)
    closing = pool.submit(line.there.close)
    line.here.close()
    closing.result(5.0)


def test_a_failure_of_this_side_is_no_loss_of_the_peer_which_gets_the_reason(
    line, monkeypatch
):
    """Such as of memory: the run's end names it, and nothing that waited stays."""
    line = line()
    sender, _ = links.channel(line.here, line.there, "down", SPEC)
    line.begin()
    window = line.here._session.window

    def full():
        raise MemoryError("no room for it")

    monkeypatch.setattr(window, "next", full)
    sender.send(1, value(1, 0))
    words = "generator:0: MemoryError: no room for it"
    with pytest.raises(driver.LineFailed, match=words):
        line.here.wait_for_step(1)
    with pytest.raises(session.PeerAborted, match=words):
        line.there.wait_for_step(1)
    line.here._driver.join()
    assert not window._messages
    line.there.abort("the end")
    line.here.abort("the end")
