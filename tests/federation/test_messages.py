import pytest

from nebula_jax.federation import messages


def test_messages_are_literal_bytes():
    assert messages.encode(messages.DATA, 5, b"abc") == b"\x02\0\0\x03\0\0\0\x05abc"
    assert messages.credit(7, 258) == b"\x03\0\0\x04\0\0\0\x07\0\0\x01\x02"
    assert messages.control(op="beat") == b'\x01\0\0\x0d\0\0\0\0{"op":"beat"}'


def test_heads_are_read_as_they_were_made():
    data = messages.encode(messages.CLOSE, 9, b"why")
    assert messages.read_head(data[:8]) == (messages.CLOSE, 9, 3)


@pytest.mark.parametrize(
    "head",
    [
        b"\0" * 8,
        b"\x05" + bytes(7),
        b"\x02\xff\xff\xff" + bytes(4),
        b"\x03\0\0\x05" + bytes(4),
    ],
)
def test_other_kinds_and_longer_ones_are_refused(head):
    with pytest.raises(messages.Malformed):
        messages.read_head(head)


@pytest.mark.parametrize("data", [b"", b"[]", b"1", b"{", b"[" * 100_000])
def test_a_control_message_is_an_object(data):
    with pytest.raises(messages.Malformed):
        messages.read_object(data)


@pytest.mark.parametrize("value", [None, "1", 1.0, True, []])
def test_a_field_has_its_type(value):
    with pytest.raises(messages.Malformed):
        messages.field({"n": value}, "n", int)
    assert messages.field({"n": 1}, "n", int) == 1


def test_a_credit_is_four_bytes():
    assert messages.read_credit(b"\0\0\x01\0") == 256
    with pytest.raises(messages.Malformed):
        messages.read_credit(b"\0")
