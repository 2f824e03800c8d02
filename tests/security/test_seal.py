import itertools

import pytest
from cryptography.hazmat.primitives.ciphers import aead

from nebula_jax.communication.wire import (
    frames,
    integrity,
    reader,
    receive_buffer,
    zstd,
)
from nebula_jax.security import seal


def sides():
    return [
        seal.Side(seal.offer(number, cluster, "m3"), f"certificate {number}".encode())
        for number, cluster in ((1, "generator:0"), (2, "discriminator"))
    ]


def seals():
    """The sender's and the receiver's seal of one direction."""
    connector, listener = sides()
    return seal.seals(connector, listener)[0], seal.seals(connector, listener)[0]


MESSAGE = frames.Tensor(0, 7, 1, [bytes(range(200)), b"more"])


def sealed(tags, message=MESSAGE):
    return b"".join(map(bytes, frames.encode(message, 3, 5, tags)))


def opened(data, tags):
    """Reads a frame as the reader does; returns its payload."""
    size = frames.head_bytes(tags)
    length = frames.header_bytes(data[:size], tags)
    head = frames.decode_head(data[:size], data[size : size + length], tags)
    payload = bytearray(data[size + length :])
    if head.kind not in frames.IN_CLEAR:
        tags.reveal(payload)
    frames.verify_payload(head, [payload], tags)
    return bytes(payload)


def test_a_frame_of_the_sender_is_one_of_the_receiver():
    sender, receiver = seals()
    for _ in range(3):
        assert opened(sealed(sender), receiver) == b"".join(MESSAGE.buffers)


def test_a_sealed_frame_adds_at_most_95_bytes():
    for kind in frames.LAYOUTS:
        assert frames.frame_bytes(kind, 0, seals()[0]) <= 95


def test_any_flipped_bit_is_noticed():
    data = sealed(seals()[0])
    for byte, bit in itertools.product(range(len(data)), range(8)):
        sender, receiver = seals()
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
    sender, receiver = seals()
    made = [sealed(sender), sealed(sender)]
    with pytest.raises(frames.Damaged, match="MAC"):
        [opened(made[number], receiver) for number in order]


def test_what_one_direction_sends_is_nothing_in_the_other():
    connector, listener = sides()
    one, other = seal.seals(connector, listener)
    with pytest.raises(frames.Damaged, match="the MAC of a head"):
        opened(sealed(one), other)


@pytest.mark.parametrize("part", ["secret", "incarnation", "cluster", "job"])
def test_keys_come_of_all_that_both_sides_bring(part):
    connector, listener = sides()
    values = {"secret": bytes(32), "incarnation": 9, "cluster": "x", "job": "y"}
    other = connector._replace(offer=connector.offer._replace(**{part: values[part]}))
    with pytest.raises(frames.Damaged):
        opened(
            sealed(seal.seals(connector, listener)[0]), seal.seals(other, listener)[0]
        )


def test_keys_come_of_both_certificates():
    connector, listener = sides()
    other = listener._replace(certificate=b"another")
    with pytest.raises(frames.Damaged):
        opened(
            sealed(seal.seals(connector, listener)[0]),
            seal.seals(connector, other)[0],
        )


KEY = bytes(range(32))
PARTS = {"payload": 0, "head": 1}


def nonce(part, frame=1):
    return PARTS[part].to_bytes(4) + frame.to_bytes(8)


@pytest.mark.parametrize("size", [0, 5, 3 * seal._PIECE_BYTES + 7])
def test_a_frame_is_two_messages_of_aes_gcm(size):
    """By another implementation: the payload encrypted, the head associated data."""
    text = bytes(i % 251 for i in range(size))
    data = sealed(seal.Seal(KEY), frames.Tensor(0, 7, 1, [text, b"more"]))
    start = frames.head_bytes(seal.Seal(KEY))
    head, payload = data[:start], data[start + frames.LAYOUTS[frames.Tensor].size :]
    fields, payload_tag, head_tag = head[:-32], head[-32:-16], head[-16:]
    made = aead.AESGCM(KEY)
    assert made.encrypt(nonce("payload"), text + b"more", b"") == payload + payload_tag
    clear = fields + payload_tag + data[start : -len(payload)]
    assert made.encrypt(nonce("head"), b"", clear) == head_tag


@pytest.mark.parametrize(
    "message",
    [
        MESSAGE,
        frames.Hello("generator:0", "0.1", {"corpus": "patient 4711"}),
        frames.Abort("patient 4711 is in no vocabulary"),
    ],
)
def test_who_carries_a_frame_reads_nothing_of_its_payload(message):
    clear = sealed(integrity.CHECKSUMS, message)
    data = sealed(seal.Seal(KEY), message)
    assert not any(clear[i : i + 8] in data for i in range(56, len(clear) - 8))


def test_the_names_of_channels_are_read_and_not_changed():
    message = frames.Welcome(3, b'[[{"name": "tokens"}], []]')
    data = sealed(seal.Seal(KEY), message)
    assert message.channels in data
    assert opened(data, seal.Seal(KEY)) == message.channels
    changed = data.replace(b"tokens", b"others")
    with pytest.raises(frames.Damaged, match="MAC of a Welcome"):
        opened(changed, seal.Seal(KEY))


def test_a_carrier_that_forges_a_table_of_lengths_puts_no_blame_on_the_peer():
    """It guesses the lengths, and so can make any other table of the encrypted one."""
    true, forged = (
        b"".join(map(bytes, zstd.with_table([bytes(size)])[:1])) for size in (10, 90)
    )
    made = reader.Schema()
    made.add([[50]], is_compressed=True)
    message = frames.Tensor(0, 1, 0, zstd.with_table([bytes(10)]))
    data = bytearray(sealed(seal.Seal(KEY), message))
    at = len(data) - len(true) - 10
    for i, (one, other) in enumerate(zip(true, forged, strict=True)):
        data[at + i] ^= one ^ other
    buffer = receive_buffer.ReceiveBuffer()
    buffer.get_buffer()[: len(data)] = data
    buffer.receive(len(data))
    with pytest.raises(frames.Damaged, match="table of lengths"):
        next(reader.read(buffer, made, lambda head: None, seal.Seal(KEY)))


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
