import contextlib
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nebula_jax.communication.wire import (
    activity,
    frames,
    reader,
    session,
    states,
    windows,
)
from nebula_jax.communication.wire.states import Role, State

SESSION = b"sixteen bytes id"
HELLO = frames.Hello("generator:0", "0.1", {"steps": 5})
TENSOR = frames.Tensor(0, 1, 0, [np.arange(8, dtype=np.uint8)])
EXAMPLES = {
    frames.Hello: HELLO,
    frames.Welcome: frames.Welcome(3),
    frames.Tensor: TENSOR,
    frames.StepDone: frames.StepDone(1),
    frames.Stop: frames.Stop(9),
    frames.End: frames.End(),
}
NUMBERED = tuple(EXAMPLES)


def joined(buffers):
    return b"".join(bytes(part) for part in buffers)


def frame(message, sequence=1, acknowledged=1):
    return joined(frames.encode(message, sequence, acknowledged))


def receive(end, data, now=0.0):
    """Gives a session bytes as a socket would."""
    data = memoryview(data)
    while len(data):
        view = end.buffer.get_buffer()
        count = min(len(view), len(data))
        view[:count] = data[:count]
        end.receive(count, now)
        data = data[count:]


class Pair:
    """Two sessions, and a line that breaks only when it is made to."""

    def __init__(self, sizes=((8,),)):
        self.ends = {role: session.Session(role, SESSION, 10.0) for role in Role}
        for end in self.ends.values():
            end.add_sender("h")
            end.add_receiver("h", sizes)
        self.dial()

    def dial(self):
        """A new connection; both sides say Open."""
        listener, connector = self.ends.values()
        connector.begin(0.0)
        opening = reader.read_opening(joined(connector.data_to_send(0.0)))
        listener.resume(*opening, 0.0)

    def move(self, role, step=None):
        """Moves all that `role` has to send; returns what the other one receives."""
        sender, receiver = self.ends[role], self.ends[role.other]
        while buffers := sender.data_to_send(0.0):
            data = joined(buffers)
            for start in range(0, len(data), step or len(data)):
                receive(receiver, data[start : start + (step or len(data))])
                if receiver.is_paused:
                    receiver.channels_ready()
        return receiver.events()

    def send(self, role, message, step=None):
        self.ends[role].send(message)
        return self.move(role, step)

    def bring(self, role, state):
        """Brings one direction into a state by legal messages."""
        self.move(Role.LISTENER)
        if state is State.START:
            return
        self.send(Role.LISTENER, HELLO)
        self.send(Role.CONNECTOR, HELLO)
        if state in (State.OPEN, State.ENDED):
            self.send(Role.LISTENER, frames.Welcome(0))
        if state is State.ENDED:
            self.send(role, frames.End())


@pytest.fixture
def pair():
    return Pair()


@pytest.fixture
def running(pair):
    """A pair of which both ends may send tensors."""
    pair.bring(Role.CONNECTOR, State.OPEN)
    return pair


CASES = list(itertools.product(Role, State, NUMBERED))


@pytest.mark.parametrize(("role", "state", "kind"), CASES)
def test_every_message_in_every_state_is_as_the_table_says(pair, role, state, kind):
    pair.bring(role, state)
    speaker, listener = pair.ends[role], pair.ends[role.other]
    message = EXAMPLES[kind]
    if kind in states.TRANSITIONS[role][state]:
        pair.send(role, message)
        expected = states.TRANSITIONS[role][state][kind]
        assert speaker.states[role] is listener.states[role] is expected
        return
    with pytest.raises(session.LocalProtocolError, match=kind.__name__):
        speaker.send(message)
    with pytest.raises(session.RemoteProtocolError, match=kind.__name__):
        receive(listener, frame(message, listener._received.count))


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("role", Role)
def test_pings_and_aborts_may_come_in_every_state(pair, role, state):
    pair.bring(role, state)
    other = pair.ends[role.other]
    receive(other, frame(frames.Ping(), 0, other.window.acknowledged))
    assert other.events() == []
    receive(other, joined(pair.ends[role].abort("why", 0.0)))
    assert other.events() == [frames.Abort("why")]
    with pytest.raises(session.RemoteProtocolError, match="without a connection"):
        receive(other, frame(frames.Ping(), 0, other.window.acknowledged))
    other.lost()
    assert other.abort("why", 0.0) == []  # there is no connection that it could take


def test_before_open_a_connector_hears_nothing_but_open_or_abort(pair):
    for message in (HELLO, frames.Ping()):
        connector = session.Session(Role.CONNECTOR, SESSION, 10.0)
        connector.begin(0.0)
        with pytest.raises(session.RemoteProtocolError, match="before Open"):
            receive(connector, frame(message, 0, 0))
    connector = session.Session(Role.CONNECTOR, SESSION, 10.0)
    connector.begin(0.0)
    receive(connector, frame(frames.Abort("no"), 0, 0))
    assert connector.events() == [frames.Abort("no")]
    pair.bring(Role.LISTENER, State.OPEN)  # nor does one that comes back
    connector = pair.ends[Role.CONNECTOR]
    connector.lost()
    connector.begin(0.0)
    with pytest.raises(session.RemoteProtocolError, match="Tensor before Open"):
        receive(connector, frame(TENSOR, sequence=2))


@pytest.mark.parametrize(
    ("opening", "acknowledged", "words"),
    [
        (frames.Open(SESSION, 1), 0, "opened connection 1 of a session"),
        (frames.Open(bytes(16), 2), 0, "opened connection 2"),
        (frames.Open(SESSION, 2), 1, "acknowledged 1 frames; .* and 0 were sent"),
    ],
)
def test_only_a_newer_connection_of_this_session_goes_on(
    pair, opening, acknowledged, words
):
    listener = pair.ends[Role.LISTENER]
    listener.send(HELLO)  # which is queued, and has reached nobody
    with pytest.raises(session.RemoteProtocolError, match=words):
        listener.resume(opening, acknowledged, 0.0)


def test_a_connection_must_open_a_session():
    with pytest.raises(frames.Damaged, match="begins no frame"):
        reader.read_opening(b"GET / HTTP/1.1\r\n" * 4)
    with pytest.raises(frames.FrameError, match="Ping before Open"):
        reader.read_opening(frame(frames.Ping(), 0) + bytes(20))


def opened():
    pair = Pair()
    pair.bring(Role.CONNECTOR, State.OPEN)
    return pair.ends[Role.LISTENER]


HUGE = 2**63


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (frame(frames.Tensor(0, 1, 0, [bytes(9)])), "9 bytes on channel 0; expected 8"),
        (frame(frames.Tensor(0, HUGE, 0, [bytes(8)])), f"a Tensor of step {HUGE}"),
        (frame(TENSOR, sequence=0), "frame 0; expected 1"),  # a replay
        (frame(TENSOR, sequence=2), "frame 2; expected 1"),  # a gap
        (frame(frames.Ping(), sequence=1), "frame 1; expected 0"),
        (frame(frames.Ping(), 0, acknowledged=3), "acknowledged 3 .* and 2 were sent"),
        (frame(frames.Open(SESSION, 1), 0), "sent Open after Open"),
    ],
)
def test_what_is_out_of_place_or_of_the_schema_is_the_peers_fault(data, words):
    with pytest.raises(session.RemoteProtocolError, match=f"generator:0 .*{words}"):
        receive(opened(), data)


def test_an_acknowledgement_cannot_be_taken_back(running):
    running.send(Role.LISTENER, frames.StepDone(1))
    end = running.ends[Role.LISTENER]
    receive(end, frame(frames.Ping(), 0, acknowledged=2))
    with pytest.raises(session.RemoteProtocolError, match=r"1 .* had acknowledged 2"):
        receive(end, frame(frames.Ping(), 0, acknowledged=1))


def test_damage_is_no_fault_of_the_peer_and_is_counted(running):
    listener = running.ends[Role.LISTENER]
    data = bytearray(frame(TENSOR))
    data[-1] ^= 1
    with pytest.raises(frames.Damaged, match=r"generator:0 .* Tensor's payload"):
        receive(listener, data)
    assert listener.ledger.entries()["received damaged frames"] == [1, 0]
    for end in running.ends.values():
        end.lost()
    running.dial()
    running.move(Role.LISTENER)
    (tensor,) = running.send(Role.CONNECTOR, TENSOR)
    np.testing.assert_array_equal(tensor.buffers[0], np.arange(8))


@given(st.binary(max_size=200), st.integers(1, 50))
def test_any_bytes_give_an_event_or_a_documented_error(data, cut):
    for prefix in (b"", frame(TENSOR)[:cut]):
        with contextlib.suppress(session.RemoteProtocolError, frames.Damaged):
            receive(opened(), prefix + data)


def test_silence_is_noticed_and_broken_by_pings(running):
    end = running.ends[Role.LISTENER]
    assert end.next_tick(0.0) == 2.5
    end.tick(1.0)
    assert end.data_to_send(1.0) == []
    end.tick(2.5)
    received = len(frame(HELLO))
    ping = frames.Ping(activity.Activity.COMPUTING, 0, received)
    assert end.data_to_send(2.5) == [frame(ping, 0, acknowledged=1)]
    assert end.next_tick(2.5) == 2.5
    receive(end, frame(frames.Ping(), 0), 8.0)
    end.tick(17.0)
    with pytest.raises(session.PeerGone, match="generator:0 has been silent for 10 s"):
        end.tick(18.0)


def test_a_ping_reports_what_its_sender_does_when_it_leaves(pair):
    doing = [activity.Report(activity.Activity.COMPUTING, 3)]
    listener, connector = pair.ends.values()
    connector.report = doing.pop
    pair.move(Role.LISTENER)
    connector.tick(2.5)
    doing.append(activity.Report(activity.Activity.SAVING, 4))
    receive(listener, joined(connector.data_to_send(9.0)), 9.5)
    assert doing == [activity.Report(activity.Activity.COMPUTING, 3)]
    assert listener.watch.activity is activity.Activity.SAVING
    assert listener.watch.progressed == 9.5  # four steps, of which it had not heard
    assert listener.watch.received == 0  # a Ping is no message


def test_a_tensor_that_comes_slowly_is_progress_of_its_sender(running):
    listener = running.ends[Role.LISTENER]
    before = listener.watch.received
    receive(listener, frame(frames.Ping(), 0), 0.0)
    data = frame(TENSOR)
    for second, byte in enumerate(data):
        receive(listener, bytes([byte]), float(second))
        assert listener.watch.progressed == second
    assert listener.watch.received == before + len(data)
    receive(listener, frame(frames.Ping(), 0), 1000.0)
    assert listener.watch.progressed == len(data) - 1


def test_own_slowness_is_not_the_peers_silence(pair):
    end = pair.ends[Role.LISTENER]
    end.liveness.received(9.0)
    end.tick(18.0)


def test_what_a_peer_receives_is_acknowledged_and_forgotten():
    big = windows.ACK_BYTES
    pair = Pair([[big]])
    pair.bring(Role.CONNECTOR, State.OPEN)
    connector = pair.ends[Role.CONNECTOR]
    for step in range(5):
        pair.send(Role.CONNECTOR, frames.Tensor(0, step, 0, [bytes(big)]))
        assert connector.window.next_sequence == connector.window.acknowledged + 1
        pair.move(Role.LISTENER)
        assert connector.window.next_sequence == connector.window.acknowledged


def test_a_hello_is_sent_again_to_a_listener_that_was_restarted_before_its_own_came():
    """Found by the simulator: one damaged Hello, and a crash soon after."""
    pair = Pair()
    pair.move(Role.LISTENER)
    assert pair.send(Role.CONNECTOR, HELLO) == [HELLO]
    pair.dial()  # the connection was lost, before the listener had sent its own
    pair.move(Role.LISTENER)
    assert pair.ends[Role.CONNECTOR].window.acknowledged == 1
    pair.ends[Role.LISTENER] = session.Session(Role.LISTENER, SESSION, 10.0)
    pair.dial()
    pair.move(Role.LISTENER)
    assert pair.move(Role.CONNECTOR) == [HELLO]
    assert pair.send(Role.LISTENER, HELLO) == [HELLO]
