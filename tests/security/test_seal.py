import itertools

import pytest

from nebula_jax.communication.wire import frames, integrity
from nebula_jax.security import seal


def sides():
    return [
        seal.Side(seal.offer(number, cluster, "m3"), f"certificate {number}".encode())
        for number, cluster in ((1, "generator:0"), (2, "discriminator"))
    ]


def macs():
    """The sender's and the receiver's MAC of one direction."""
    connector, listener = sides()
    return seal.macs(connector, listener)[0], seal.macs(connector, listener)[0]


MESSAGE = frames.Tensor(0, 7, 1, [bytes(range(200)), b"more"])


def sealed(tags, message=MESSAGE):
    return b"".join(map(bytes, frames.encode(message, 3, 5, tags)))


def opened(data, tags):
    """Reads a frame as the reader does; returns its payload."""
    size = frames.head_bytes(tags)
    length = frames.header_bytes(data[:size], tags)
    head = frames.decode_head(data[:size], data[size : size + length], tags)
    payload = data[size + length :]
    frames.verify_payload(head, [payload], tags)
    return payload


def test_a_frame_of_the_sender_is_one_of_the_receiver():
    sender, receiver = macs()
    for _ in range(3):
        assert opened(sealed(sender), receiver) == b"".join(MESSAGE.buffers)


def test_a_sealed_frame_adds_at_most_95_bytes():
    for kind in frames.LAYOUTS:
        assert frames.frame_bytes(kind, 0, macs()[0]) <= 95


def test_any_flipped_bit_is_noticed():
    data = sealed(macs()[0])
    for byte, bit in itertools.product(range(len(data)), range(8)):
        sender, receiver = macs()
        changed = bytearray(sealed(sender))
        changed[byte] ^= 1 << bit
        with pytest.raises(frames.Damaged):
            opened(bytes(changed), receiver)


@pytest.mark.parametrize(
    "order",
    [
        pytest.param([0, 0], id="repeated"),
        pytest.param([1], id="left out"),
        pytest.param([1, 0], id="moved"),
    ],
)
def test_frames_out_of_order_are_noticed(order):
    sender, receiver = macs()
    made = [sealed(sender), sealed(sender)]
    with pytest.raises(frames.Damaged, match="MAC"):
        [opened(made[number], receiver) for number in order]


def test_what_one_direction_sends_is_nothing_in_the_other():
    connector, listener = sides()
    one, other = seal.macs(connector, listener)
    with pytest.raises(frames.Damaged, match="the MAC of a head"):
        opened(sealed(one), other)


@pytest.mark.parametrize("part", ["secret", "incarnation", "cluster", "job"])
def test_keys_come_of_all_that_both_sides_bring(part):
    connector, listener = sides()
    values = {"secret": bytes(32), "incarnation": 9, "cluster": "x", "job": "y"}
    other = connector._replace(offer=connector.offer._replace(**{part: values[part]}))
    with pytest.raises(frames.Damaged):
        opened(sealed(seal.macs(connector, listener)[0]), seal.macs(other, listener)[0])


def test_keys_come_of_both_certificates():
    connector, listener = sides()
    other = listener._replace(certificate=b"another")
    with pytest.raises(frames.Damaged):
        opened(
            sealed(seal.macs(connector, listener)[0]),
            seal.macs(connector, other)[0],
        )


def test_a_tag_is_gmac_of_the_buffers_as_if_they_were_one():
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    mac = seal.Mac(bytes(range(32)))
    mac.next_frame()
    nonce = bytes(4) + (1).to_bytes(8)
    expected = AESGCM(bytes(range(32))).encrypt(nonce, b"", b"one and two")
    assert mac.tag(integrity.PAYLOAD, [b"one and ", b"two"]) == expected


def test_offers_are_read_as_they_were_made():
    made = seal.offer(7, "generator:0", "m3")
    assert seal.read_offer(made.encode()) == made
    assert len(made.encode()) == seal.OFFER_BYTES


def test_an_offer_of_another_version_is_refused():
    data = seal.offer(7, "generator:0", "m3").encode()
    with pytest.raises(seal.SealError, match="offers keys as"):
        seal.read_offer(b"NEBSEAL9" + data[8:])
    with pytest.raises(seal.SealError, match="cannot be read"):
        seal.read_offer(data[:48] + b"\xff" + data[49:])


def test_a_name_that_does_not_fit_is_an_error():
    with pytest.raises(seal.SealError, match="too long"):
        seal.offer(1, "x" * 65, "m3").encode()
