import contextlib
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nebula_jax.communication import frames, protocol
from nebula_jax.communication.protocol import Role, State

HELLO = frames.Hello("generator:0", "0.1", {"steps": 5})
EXAMPLES = {
    frames.Hello: HELLO,
    frames.Welcome: frames.Welcome(3),
    frames.Tensor: frames.Tensor(0, 1, 0, [np.arange(8, dtype=np.uint8)]),
    frames.StepDone: frames.StepDone(1),
    frames.Stop: frames.Stop(9),
    frames.Ping: frames.Ping(),
    frames.End: frames.End(),
    frames.Abort: frames.Abort("why"),
}


class Pair:
    """Two connections and a line that never fails."""

    def __init__(self):
        self.ends = {role: protocol.Connection(role, 10.0, 0.0) for role in Role}
        for end in self.ends.values():
            end.add_channel([8])

    def say(self, role, message, step=None):
        data = b"".join(bytes(part) for part in self.ends[role].send(message, 0.0))
        other = self.ends[role.other]
        for start in range(0, len(data), step or len(data)):
            other.receive_data(data[start : start + (step or len(data))], 0.0)
        return list(iter(other.next_event, None))

    def bring(self, role, state):
        """Brings one direction into a state by legal messages."""
        if state is State.START:
            return
        self.say(Role.LISTENER, HELLO)
        self.say(Role.CONNECTOR, HELLO)
        if state in (State.OPEN, State.ENDED):
            self.say(Role.LISTENER, frames.Welcome(0))
        if state is State.ENDED:
            self.say(role, frames.End())


@pytest.fixture
def pair():
    return Pair()


@pytest.mark.parametrize("step", [None, 1, 7])
def test_a_conversation_arrives_whole_however_it_is_cut(pair, step):
    for role in Role:
        assert pair.say(role, HELLO, step) == [HELLO]
    assert pair.say(Role.LISTENER, frames.Welcome(4), step) == [frames.Welcome(4)]
    (tensor,) = pair.say(Role.CONNECTOR, EXAMPLES[frames.Tensor], step)
    np.testing.assert_array_equal(tensor.buffers[0], np.arange(8))
    assert tensor.buffers[0].ctypes.data % protocol.ALIGNMENT == 0
    assert pair.say(Role.LISTENER, frames.StepDone(1), step) == [frames.StepDone(1)]
    for role in Role:
        assert pair.say(role, frames.End(), step) == [frames.End()]
        pair.ends[role.other].receive_eof()


CASES = list(itertools.product(Role, State, frames.KINDS))


@pytest.mark.parametrize(("role", "state", "kind"), CASES)
def test_every_message_in_every_state_is_as_the_table_says(pair, role, state, kind):
    pair.bring(role, state)
    speaker, listener = pair.ends[role], pair.ends[role.other]
    message = EXAMPLES[kind]
    if kind in protocol.TRANSITIONS[role][state]:
        pair.say(role, message)
        expected = protocol.TRANSITIONS[role][state][kind]
        assert speaker.local_state is listener.remote_state is expected
        return
    with pytest.raises(protocol.LocalProtocolError, match=kind.__name__):
        speaker.send(message, 0.0)
    frame = frames.encode(message, listener._received)
    with pytest.raises(protocol.RemoteProtocolError, match=kind.__name__):
        listener.receive_data(b"".join(bytes(part) for part in frame), 0.0)


def opened():
    pair = Pair()
    pair.bring(Role.CONNECTOR, State.OPEN)
    return pair.ends[Role.LISTENER]


def frame(message, sequence=1):
    return b"".join(bytes(part) for part in frames.encode(message, sequence))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (frame(frames.Tensor(3, 1, 0, [bytes(8)])), "channel 3; 1 channels are agreed"),
        (frame(frames.Tensor(0, 1, 0, [bytes(9)])), "9 bytes on channel 0; .* says 8"),
        (frame(frames.Ping(), sequence=0), "frame 0; expected 1"),
        (frame(frames.Ping(), sequence=2), "frame 2; expected 1"),
        (frames.HEAD.pack(b"NEBL", 1, 7, 0, 1, 2**63), "at most 4096"),
        (frames.HEAD.pack(b"NEBL", 1, 5, 0, 1, 1), "at most 0"),
        (b"x" * 24, "begins no frame"),
    ],
)
def test_what_is_not_in_the_plan_is_refused_before_memory_is_taken(data, words):
    with pytest.raises(protocol.RemoteProtocolError, match=f"generator:0 .*{words}"):
        opened().receive_data(data, 0.0)


@given(st.binary(max_size=200), st.integers(1, 50))
def test_any_bytes_give_an_event_or_a_documented_error(data, cut):
    for prefix in (b"", frame(EXAMPLES[frames.Tensor])[:cut]):
        with contextlib.suppress(protocol.RemoteProtocolError):
            opened().receive_data(prefix + data, 0.0)


def test_silence_is_noticed_and_broken_by_pings(pair):
    pair.bring(Role.CONNECTOR, State.OPEN)
    end = pair.ends[Role.LISTENER]
    assert end.next_tick(0.0) == 2.5
    assert end.tick(1.0) == []
    (ping,) = end.tick(2.5)
    assert ping == frame(frames.Ping(), sequence=2)
    assert end.next_tick(2.5) == 2.5
    end.receive_data(frame(frames.Ping()), 8.0)
    end.tick(17.0)
    with pytest.raises(protocol.PeerGone, match="generator:0 has been silent for 10 s"):
        end.tick(18.0)


def test_own_slowness_is_not_the_peers_silence(pair):
    end = pair.ends[Role.LISTENER]
    end.not_reading(9.0)
    end.tick(18.0)


def test_a_closed_connection_without_goodbye_is_an_error(pair):
    pair.bring(Role.CONNECTOR, State.OPEN)
    with pytest.raises(protocol.PeerGone, match="generator:0 closed the connection"):
        pair.ends[Role.LISTENER].receive_eof()


def test_the_ledger_counts_every_byte_by_kind(pair):
    pair.bring(Role.CONNECTOR, State.OPEN)
    pair.say(Role.CONNECTOR, EXAMPLES[frames.Tensor])
    pair.say(Role.CONNECTOR, EXAMPLES[frames.Tensor])
    size = frames.HEAD.size + frames.Tensor.LAYOUT.size + 8
    assert pair.ends[Role.CONNECTOR].ledger["sent Tensor[0]"] == [2, 2 * size]
    assert pair.ends[Role.LISTENER].ledger["received Tensor[0]"] == [2, 2 * size]
