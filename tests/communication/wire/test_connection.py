"""A session on one socket after the other, in time that only the tests move on."""

import socket
import ssl
import types

import pytest

from nebula_jax.communication import wan
from nebula_jax.communication.wire import connection, frames, session, states, wakeups
from nebula_jax.communication.wire.activity import Activity

SESSION = b"sixteen bytes id"
TIMEOUT = 60.0
TENSOR = frames.Tensor(0, 1, 0, [bytes(8)])


class Side:
    """A connector's side, whose peer has sent its Welcome and has all so far."""

    def __init__(self, stack, monkeypatch):
        self.now, self.said = 0.0, []
        clock = types.SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(connection, "time", clock)
        self._stack, self._epoch, self._received = stack, 0, 0
        self.session = session.Session(states.Role.CONNECTOR, SESSION, 30.0)
        self.session.add_sender("h")
        wakes = wakeups.Waker()
        stack.callback(wakes.close)
        self.connection = connection.Connection(
            self.session,
            wan.Line(),
            wakes,
            receive=lambda message: None,
            has_room=lambda: True,
            notify=lambda: None,
            reconnect_timeout=TIMEOUT,
            log=self.said.append,
        )
        stack.callback(self.connection.drop)
        self.connect()
        self.connection.send(frames.Hello("generator:0", "0.1", {}), is_small=True)
        self.come(frames.Hello("discriminator", "0.1", {}), 0, acknowledged=1)
        self.come(frames.Welcome(0), 1, acknowledged=1)
        self.session.channels_ready()

    def connect(self):
        """Has a new connection, on which the peer has sent Open."""
        ours, self.peer = socket.socketpair()
        self._stack.callback(self.peer.close)
        self._epoch += 1
        self.session.begin(self.now)
        self.connection.adopt(ours)
        acknowledged = self.session.window.acknowledged
        self.come(frames.Open(SESSION, self._epoch), 0, acknowledged)

    def come(self, message, sequence=0, acknowledged=1):
        for part in frames.encode(message, sequence, acknowledged):
            self.peer.sendall(part)
        self.connection.turn(is_readable=True)

    def break_it(self):
        self.peer.close()
        with pytest.raises((OSError, session.PeerGone)) as error:
            self.connection.turn(is_readable=True)
        self.connection.lose(error.value)

    @property
    def left(self):
        """The seconds until this side gives up."""
        return self.connection.deadline() - self.now


@pytest.fixture
def side(monkeypatch, stack):
    side = Side(stack, monkeypatch)
    side.now = 10.0
    side.break_it()
    assert side.left == TIMEOUT
    side.now = 18.0
    side.connect()
    return side


@pytest.mark.parametrize(
    ("doing", "grows", "left"),
    [
        (Activity.EVALUATING, False, TIMEOUT),  # it has no room
        (Activity.EVALUATING, True, TIMEOUT - 8),  # but what comes is never whole
        (Activity.WAITING, False, TIMEOUT - 8),  # it has room, and nothing comes
        (Activity.WAITING, True, TIMEOUT - 8),
    ],
)
def test_a_message_that_a_peer_leaves_unread_makes_no_connection_a_bad_one(
    side, doing, grows, left
):
    side.connection.send(TENSOR, is_small=True)
    for seconds in range(1, 100):
        side.now = 18.0 + seconds
        if seconds % 7 == 0:
            side.come(frames.Ping(doing, 0, 1000 + grows * seconds))
    side.break_it()
    assert side.left == left


def test_a_message_that_was_just_sent_makes_no_connection_a_bad_one(side):
    """Before it nothing was under way, although nobody has looked for a while."""
    side.now = 100.0
    side.connection.send(TENSOR, is_small=True)
    side.now = 101.0
    side.break_it()
    assert side.left == TIMEOUT


def test_a_message_that_has_waited_on_a_connection_makes_it_no_good_one(side):
    side.connection.send(TENSOR, is_small=True)
    side.now = 100.0
    side.break_it()
    assert side.left == TIMEOUT - 8


def test_a_line_that_is_silent_leaves_a_trace_for_whoever_is_on_call(side):
    side.said.clear()
    begun = side.now
    for seconds in range(26):
        side.now = begun + seconds
        side.connection.turn(is_readable=False)
    assert side.said == ["no sign of discriminator for 10 s; waiting"]
    side.come(frames.Ping())
    assert side.said[1:] == ["discriminator is there again, after 25.0 s"]


def test_a_silence_that_ends_with_another_connection_is_over_as_well(side):
    side.said.clear()
    begun = side.now
    for seconds in range(15):
        side.now = begun + seconds
        side.connection.turn(is_readable=False)
    side.connect()
    assert side.said[1:] == ["discriminator is there again, after 14.0 s"]


def test_what_openssl_says_of_a_broken_line_has_a_sentence_before_it():
    raw = "[SSL: SSLV3_ALERT_BAD_RECORD_MAC] ssl/tls alert bad record mac (_ssl.c:2590)"
    error = connection.as_error(ssl.SSLError(1, raw), "generator:0")
    assert str(error) == (
        f"lost the connection to generator:0: bytes were changed on their way ({raw})"
    )
