"""100,000 mutated streams against a real listener, beside a peer that means well.

A twentieth of them is in every run of the tests, the others are slow. Each is a
connection: all or part of a conversation, with changes drawn by a seed that a failure
names. Some break checksums; others compute them anew, to reach what is behind them.
"""

import contextlib
import gc
import os
import random
import socket
import struct
import threading

import jax
import jax.numpy as jnp
import links
import numpy as np
import psutil
import pytest

from nebula_jax import errors
from nebula_jax.communication import codec, listener
from nebula_jax.communication.wire import frames, integrity

STREAMS = 100_000
PARTS = 20  # tests that share them
CONVERSATIONS = 200  # that streams of a test are made of: sessions come again
ADDRESSES = 40  # of those who connect
AT_A_TIME = 64  # connections
HEAD = struct.Struct("!4sBBHQQQQQ")  # of a plain frame
MOST_MEMORY = 64 << 20  # bytes that may be taken and not given back
SPEC = {"x": jax.ShapeDtypeStruct((8, 16), jnp.float32)}
GENERATORS = ("generator:0", "generator:1")
HELLO = frames.Hello("discriminator", "1", {"--seed": 0})


class Streams:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._conversations = [self._conversation() for _ in range(CONVERSATIONS)]

    def draw(self) -> bytes:
        """Returns all that one connection sends."""
        kind = self._random.random()
        if kind < 0.1:
            return self._garbage()
        parts = list(self._random.choice(self._conversations))
        if kind < 0.5:
            return self._damaged(b"".join(parts))
        if kind < 0.6:
            self._random.shuffle(parts)
        return b"".join(map(self._forged, parts))

    def _garbage(self) -> bytes:
        begins = (b"", b"GET / HTTP/1.1\r\n", b"\x16\x03\x01\x02\x00\x01", b"NEBL\x03")
        return self._random.choice(begins) + self._random.randbytes(200)

    def _conversation(self) -> list[bytes]:
        """Returns the frames of a conversation that may be in order."""
        name = self._random.choice(["generator:1", "generator:1", "generator:7", "x"])
        tensor = np.zeros(512, np.uint8)
        messages = [
            frames.Open(self._random.randbytes(16), self._random.choice([0, 1, 1, 7])),
            frames.Hello(name, "1", {"--seed": 0}),
            frames.Ping(),
            frames.Tensor(0, 1, 0, [tensor]),
            frames.Stop(0),
            frames.Tensor(0, 2, 0, [tensor]),
            frames.End(),
            frames.Abort("no \x1b[31mreason"),
        ]
        count = self._random.choice([1, 2, 2, 3, 5, len(messages)])
        found, sequence = [], 0
        for message in messages[:count]:
            is_numbered = type(message) not in frames.UNNUMBERED
            found.append(encoded(message, sequence if is_numbered else 0))
            sequence += is_numbered
        return found

    def _damaged(self, stream: bytes) -> bytes:
        """Changes bytes; checksums are those of before."""
        data = bytearray(stream)
        for _ in range(self._random.choice([1, 1, 2, 10])):
            at, size = self._random.randrange(len(data)), self._random.randrange(1, 40)
            match self._random.randrange(5):
                case 0:
                    data[at] ^= 1 << self._random.randrange(8)
                case 1:
                    data[at : at + size] = self._random.randbytes(size)
                case 2:
                    del data[at + 1 :]
                case 3:
                    data[at:at] = data[at : at + size]
                case 4:
                    del data[at : at + size]
            if not data:
                break
        return bytes(data)

    def _forged(self, frame: bytes) -> bytes:
        """Changes fields of a head or a payload; checksums fit."""
        if self._random.random() < 0.5:
            return frame
        head, rest = frame[: HEAD.size], frame[HEAD.size :]
        fields = list(HEAD.unpack(head))[:-1]
        header, payload = rest[: fields[3]], bytearray(rest[fields[3] :])
        extreme = self._random.choice([0, 1, 2, 255, 2**16, 2**31, 2**63, 2**64 - 1])
        match self._random.randrange(5):
            case 0:
                fields[2] = extreme % 256  # kind
            case 1:
                fields[self._random.choice([4, 5, 6])] = extreme
            case 2:
                header = self._random.randbytes(len(header))
            case 3 if payload:
                payload[self._random.randrange(len(payload))] ^= 0x20
            case _:
                payload += self._random.randbytes(extreme % 100)
                fields[6] = len(payload)
        fields[7] = integrity.checksum((bytes(payload),))
        start = HEAD.pack(*fields, 0)[: -frames.CHECKSUM.size]
        total = frames.CHECKSUM.pack(integrity.checksum((start + header,)))
        return start + total + header + bytes(payload)


def encoded(message, sequence: int) -> bytes:
    return b"".join(map(bytes, frames.encode(message, sequence, 0)))


def send_all(address, streams) -> None:
    """Sends each stream on a connection of its own, and reads to its end."""
    waiting: list[socket.socket] = []

    def finish() -> None:
        for sock in waiting:
            try:
                while sock.recv(1 << 16):
                    pass
            except ConnectionError:  # what it sent was not even read
                pass
            sock.close()
        waiting.clear()

    for number, stream in enumerate(streams):
        sock = socket.socket()
        sock.settimeout(30)
        # Ports of one address would run out, and one address alone has few places.
        sock.bind((f"127.0.1.{1 + number % ADDRESSES}", 0))
        sock.connect(address)
        waiting.append(sock)
        try:
            sock.sendall(stream)
            sock.shutdown(socket.SHUT_WR)
        except OSError:  # it was closed before all was sent
            pass
        if len(waiting) == AT_A_TIME:
            finish()
    finish()


def serve(listening, found, stop) -> None:
    """Treats whoever comes as a generator; collects what that raises."""
    while not stop.is_set():
        try:
            link = listening.accept(0.1)
        except errors.NebulaError:
            continue
        try:
            tokens = link.receiver("tokens", SPEC, codec.identity())
            link.welcome(0)
            for step in (1, 2, 3):
                tokens.recv(step)
        except Exception as error:
            found.add(type(error))
        finally:
            link.abort("no more")


@pytest.fixture
def raised(monkeypatch):
    """The types of what hostile connections raised in the listener's thread."""
    types: set[type] = set()
    original = listener.Listener._steps

    def recorded(self, pending):
        try:
            yield from original(self, pending)
        except Exception as error:
            types.add(type(error))
            raise

    monkeypatch.setattr(listener.Listener, "_steps", recorded)
    return types


def standing() -> tuple[int, int, int]:
    """Returns descriptors, threads and bytes of memory of this process."""
    gc.collect()
    process = psutil.Process()
    return process.num_fds(), threading.active_count(), process.memory_info().rss


@pytest.mark.parametrize(
    "seed",
    [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, PARTS))],
)
def test_mutated_streams_leave_nothing_behind_and_keep_nobody_out(seed, raised):
    before = standing()
    streams, served, stop = Streams(seed), set(), threading.Event()
    server = {"ours": HELLO, "clusters": GENERATORS}
    client = {"theirs": frames.Hello("generator:0", "1", {"--seed": 0})}
    settings = {"peer_timeout": 10.0, "reconnect_timeout": 0.1}
    with contextlib.ExitStack() as stack:
        pair = links.Pair(stack, server, client, **settings)
        listening, link, peer = pair.listener, pair.here, pair.there
        tokens = link.receiver("tokens", SPEC, codec.identity())
        sender = peer.sender("tokens", SPEC, codec.identity())
        pair.begin()

        server = threading.Thread(target=serve, args=(listening, served, stop))
        server.start()
        drawn = (streams.draw() for _ in range(STREAMS // PARTS))
        send_all(listening.address, drawn)
        stop.set()
        server.join()

        expected = np.arange(128, dtype=np.float32).reshape(8, 16)
        sender.send(1, {"x": jnp.asarray(expected)})
        np.testing.assert_array_equal(tokens.recv(1)["x"], expected)
        closing = threading.Thread(target=peer.close)
        closing.start()
        link.close()
        closing.join()
    ours = (errors.NebulaError, OSError)
    assert raised, "nothing was refused"
    assert served, "nobody got in"
    assert all(issubclass(each, ours) for each in raised | served), raised | served
    descriptors, threads, memory = standing()
    assert descriptors <= before[0], os.listdir("/proc/self/fd")
    assert threads <= before[1], threading.enumerate()
    assert memory < before[2] + MOST_MEMORY
