import json

import pytest

from nebula_jax import errors
from nebula_jax.communication.wire import frames
from nebula_jax.federation import meter
from nebula_jax.security import policy, seal, store

RECORD = b"\x16\x03\x03\x00\x05hello"
NAMES = json.dumps(
    [
        [{"name": name, "codec": "fp16"} for name in names]
        for names in (["grads"], ["tokens", "held_out"])
    ]
)
WELCOME = frames.Welcome(4, NAMES.encode())


def frame(message, sequence=1):
    return b"".join(map(bytes, frames.encode(message, sequence, 0, MAC)))


MAC = seal.Seal(bytes(32))
OPEN = frame(frames.Open(bytes(16), 1), 0)
TENSOR = frame(frames.Tensor(1, 2, 0, [bytes(300)]))


def let_pass(*_):
    """Lets everything pass."""


def meters(admit=let_pass):
    names = meter.Names()
    sides = (False, True)
    return [meter.Meter(names, side, admit, let_pass) for side in sides]


def test_kinds_are_frames_and_channels_by_name():
    connector, listener = meters()
    listener.feed(RECORD + RECORD + OPEN + frame(WELCOME))
    connector.feed(RECORD + OPEN + TENSOR + TENSOR)
    assert connector.seen == {
        "handshake": [1, len(RECORD)],
        "Open": [1, len(OPEN)],
        "held_out": [2, 2 * len(TENSOR)],
    }
    assert listener.seen == {
        "handshake": [2, 2 * len(RECORD)],
        "Open": [1, len(OPEN)],
        "Welcome": [1, len(frame(WELCOME))],
    }


@pytest.mark.parametrize("size", [1, 2, 7, 63, 100])
def test_however_the_bytes_are_cut(size):
    connector, listener = meters()
    listener.feed(OPEN + frame(WELCOME))
    data = RECORD + OPEN + TENSOR + frame(frames.Ping(), 0) + TENSOR
    for start in range(0, len(data), size):
        connector.feed(data[start : start + size])
    assert sum(count for _, count in connector.seen.values()) == len(data)
    assert connector.seen["held_out"] == [2, 2 * len(TENSOR)]


def test_nothing_of_a_frame_that_is_not_admitted_passes_unseen():
    admitted = []

    def admit(kind, count):
        admitted.append(kind)
        if kind == "held_out":
            raise errors.NebulaError("not this")

    connector, listener = meters(admit)
    listener.feed(OPEN + frame(WELCOME))
    with pytest.raises(errors.NebulaError, match="not this"):
        connector.feed(OPEN + TENSOR[:66])  # its head alone
    assert "held_out" not in connector.seen


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"GET / HTTP/1.1\r\n" * 8, id="HTTP"),
        pytest.param(b"SSH-2.0-OpenSSH_9.2\r\n" * 8, id="SSH"),
        pytest.param(
            b"".join(map(bytes, frames.encode(frames.Ping(), 0, 0))) * 2, id="plain"
        ),
        pytest.param(TENSOR, id="a tensor before the Welcome"),
        pytest.param(OPEN[:4] + b"\x09" + OPEN[5:], id="another version"),
        pytest.param(OPEN[:5] + b"\x77" + OPEN[6:], id="another kind"),
        pytest.param(OPEN[:6] + b"\x00\x01" + OPEN[8:], id="another header"),
        pytest.param((b"\x16\x03\x03\x40\x00" + bytes(1 << 14)) * 5, id="endless"),
        pytest.param(b"\x16\x09\x03\x00\x05hello", id="no TLS"),
        pytest.param(frame(frames.Welcome(1, b"{")), id="no names"),
    ],
)
def test_what_is_no_stream_of_ours_is_refused(data):
    made = meters()
    with pytest.raises(meter.Unreadable):
        [each.feed(data) for each in made]


def test_a_stream_has_so_many_kinds_each_an_entry_of_the_log(monkeypatch):
    monkeypatch.setattr(meter, "MOST_KINDS", 3)
    connector, listener = meters()
    listener.feed(OPEN + frame(WELCOME))
    connector.feed(RECORD + OPEN + TENSOR + TENSOR)
    with pytest.raises(meter.Unreadable, match="more than 3 kinds"):
        connector.feed(frame(frames.Ping(), 0))


def longer(message, payload):
    """A frame whose head has another length of the payload, and the payload."""
    head = bytearray(frame(message))
    head[24:32] = payload.to_bytes(8, "big")
    return bytes(head) + bytes(payload)


@pytest.mark.parametrize(
    ("message", "payload"),
    [
        (frames.StepDone(3), 10_000_000),
        (frames.StepDone(3), 1),
        (frames.Stop(3), 1),
        (frames.Ping(), 1),
        (frames.End(), 1),
        (frames.Open(bytes(16), 1), 1),
        (frames.Hello("generator:0", "0.1", {}), frames.MAX_HELLO_BYTES + 1),
        (frames.Abort("it was stopped"), frames.MAX_REASON_BYTES + 1),
        (frames.Welcome(1, b"[[], []]"), frames.MAX_WELCOME_BYTES + 1),
    ],
)
def test_nothing_passes_as_the_payload_of_a_message_that_has_none(message, payload):
    admitted = []
    connector, _ = meters(lambda kind, count: admitted.append(kind))
    connector.feed(OPEN)
    with pytest.raises(meter.Unreadable, match="payload of"):
        connector.feed(longer(message, payload))
    assert admitted == ["Open"]


def test_no_tensor_is_longer_than_sums_can_be():
    """A frame is counted at its head, and a head may claim any length."""
    connector, listener = meters()
    listener.feed(OPEN + frame(WELCOME))
    for payload in (meter.MOST_PAYLOAD + 1, 2**64 - 1):
        head = TENSOR[:24] + payload.to_bytes(8, "big") + TENSOR[32:]
        with pytest.raises(meter.Unreadable, match="a Tensor with a payload of"):
            connector.feed(OPEN + head)
    assert "held_out" not in connector.seen


@pytest.mark.parametrize(
    "message", [frames.Hello("generator:0", "0.1", {}), WELCOME, frames.Abort("enough")]
)
def test_messages_with_a_payload_come_once_on_a_stream(message):
    _, listener = meters()
    listener.feed(OPEN + frame(message))
    with pytest.raises(meter.Unreadable, match="second"):
        listener.feed(frame(message))


def test_messages_without_a_payload_come_as_often_as_they_are_sent():
    _, listener = meters()
    listener.feed(OPEN + frame(frames.Ping(), 0) * 3 + frame(frames.StepDone(1)) * 3)
    assert listener.seen["Ping"][0] == listener.seen["StepDone"][0] == 3


def test_a_session_that_goes_on_over_another_stream_keeps_its_names():
    known = {}
    first = meter.Meter(meter.Names(known), True, let_pass, let_pass)
    first.feed(OPEN + frame(WELCOME))
    later = meter.Meter(meter.Names(known), False, let_pass, let_pass)
    later.feed(RECORD + frame(frames.Open(bytes(16), 2), 0) + TENSOR)
    assert later.seen["held_out"] == [1, len(TENSOR)]
    other = meter.Meter(meter.Names(known), False, let_pass, let_pass)
    with pytest.raises(meter.Unreadable, match="channel 1, of 0"):
        other.feed(frame(frames.Open(b"another session!", 1), 0) + TENSOR)


def test_the_names_of_a_session_that_goes_on_outlast_those_of_many_others():
    known = {}

    def stream(number, *messages):
        names = meter.Names(known)
        opened = frame(frames.Open(number.to_bytes(16, "big"), 1), 0)
        made = [meter.Meter(names, side, let_pass, let_pass) for side in (True, False)]
        for each in made:
            each.feed(opened)
        made[0].feed(b"".join(messages))
        return made[1]

    lasting = stream(0, frame(WELCOME))
    for number in range(1, 2 * meter.MOST_SESSIONS):
        stream(number, frame(WELCOME))
        lasting.feed(TENSOR)
    stream(0).feed(TENSOR)
    assert len(known) == meter.MOST_SESSIONS


def test_a_connector_names_no_channels():
    connector, _ = meters()
    connector.feed(frame(WELCOME))
    with pytest.raises(meter.Unreadable, match="channel 1, of 0"):
        connector.feed(TENSOR)


@pytest.mark.parametrize("name", sorted(policy.STEERING))
def test_no_tensor_passes_as_a_message_that_steers(name):
    """The listener names the channels, and such messages pass every policy."""
    admitted = []
    connector, listener = meters(lambda kind, count: admitted.append(kind))
    names = [{"name": each, "codec": ""} for each in ("tokens", name)]
    listener.feed(OPEN + frame(frames.Welcome(4, json.dumps([[], names]).encode())))
    with pytest.raises(meter.Unreadable, match=f"a channel named {name}"):
        connector.feed(OPEN + TENSOR)
    assert admitted == ["Open", "Welcome", "Open"]


def test_all_messages_but_tensors_steer():
    kinds = {each.__name__ for each in frames.KINDS} - {"Tensor"}
    assert kinds | {meter.HANDSHAKE} == policy.STEERING


def test_a_channel_cannot_have_a_name_that_no_entry_takes():
    """A listener of another lab names the channels, and every name is recorded."""
    wicked = [f"nebula1.{'a' * 16}", "-----BEGIN PRIVATE KEY-----", "tokens"]
    names = meter.Names()
    names.begin(bytes(16))
    names.learn(
        json.dumps([[{"name": each, "codec": ""} for each in wicked], []]).encode()
    )
    assert names.of(is_listener=True) == [*["(may be a secret)"] * 2, "tokens"]


def test_the_names_of_all_sessions_fit_the_file_that_keeps_them(monkeypatch):
    """Who sends a Welcome could else make a file that no switch can read again."""
    assert meter.MOST_NAMES + 6 * (1 << 20) < store.MOST_BYTES
    monkeypatch.setattr(meter, "MOST_NAMES", 1 << 17)
    known, each = {}, {"name": "n" * 64, "codec": "\u00e9" * 400}
    payload = json.dumps([[each] * 20, []], ensure_ascii=False).encode()
    for number in range(9):
        names = meter.Names(known)
        names.begin(number.to_bytes(16, "big"))
        names.learn(payload)
    assert len(json.dumps(known)) < (1 << 17) + 6 * len(payload)
    assert list(known)[-1] == (8).to_bytes(16, "big").hex()


def test_a_welcome_is_of_a_session():
    """Else its names would serve for every stream that opens none, of any job."""
    known = {}
    listener = meter.Meter(meter.Names(known), True, let_pass, let_pass)
    with pytest.raises(meter.Unreadable, match="a Welcome before an Open"):
        listener.feed(frame(WELCOME))
    assert not known
