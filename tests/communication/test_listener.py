"""A real listener among strangers: who is known gets in, and nothing is left behind."""

import contextlib
import functools
import gc
import os
import pathlib
import resource
import socket
import ssl
import struct
import threading
import time

import links
import pytest
from two_labs import wait_until

from nebula_jax.communication import pending_connections
from nebula_jax.communication.wire import frames, greeting, integrity
from nebula_jax.security import tls
from nebula_jax.security.tls import certificates

SETTINGS = {"peer_timeout": 10.0, "reconnect_timeout": 20.0}
HELLO = frames.encode(links.hello("generator:0"), 0, 0)[0]
STRANGERS = 300
BACK_SECONDS = 5.0  # for a known peer, whoever else comes


def opening(session_id=bytes(16), epoch=1, acknowledged=0):
    return frames.encode(frames.Open(session_id, epoch), 0, acknowledged)[0]


@pytest.fixture(autouse=True)
def enough_files():
    """Both ends of all connections are in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 16_384), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("credentials")
    certificates.issue_for_run(folder, ["discriminator", "generator:0", "generator:1"])
    return folder


def listen(tls_contexts, said):
    more = {"tls": tls_contexts, "clusters": ["generator:0"], "log": said.append}
    return links.listening(**SETTINGS | more)


@functools.cache
def client_hello():
    """The first record of a TLS client."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    outgoing = ssl.MemoryBIO()
    client = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="d")
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


class Strangers:
    """Connections that never become anything."""

    def __init__(self, address, kind, encrypted, hosts):
        self._address, self._hosts, self._kind = address, hosts, kind
        self._data = client_hello() if encrypted else opening()
        self._sockets = []
        self._is_done = threading.Event()
        self._drip = threading.Thread(target=self._send_a_byte_a_second)
        if kind == "dripping":
            self._drip.start()

    def come(self, count):
        for _ in range(count):
            host = self._hosts[len(self._sockets) % len(self._hosts)]
            sock = socket.create_connection(self._address, 5.0, (host, 0))
            if self._kind == "half a handshake":
                sock.sendall(self._data)
            self._sockets.append(sock)

    def _send_a_byte_a_second(self):
        for byte in self._data:
            for sock in list(self._sockets):
                with contextlib.suppress(OSError):
                    sock.send(bytes([byte]))
            if self._is_done.wait(1.0):
                return

    def go(self):
        self._is_done.set()
        if self._kind == "dripping":
            self._drip.join()
        for sock in self._sockets:
            sock.close()


@pytest.fixture
def linked(folder, stack):
    """Makes a listener and its generator, over a line that can break."""

    def linked(encrypted=True):
        server, client = {"clusters": ["generator:0"]}, {}
        if encrypted:
            server["tls"] = tls.server_contexts(folder / "discriminator")
            client["tls"] = tls.client_contexts(folder / "generator-0")
        return links.Pair(stack, server, client, breaks=True, **SETTINGS)

    return linked


@pytest.fixture
def strangers(stack):
    """Makes `Strangers`, who go when the test ends."""

    def strangers(*kind):
        made = Strangers(*kind)
        stack.callback(made.go)
        return made

    return strangers


SAME, OTHERS = ["127.0.0.1"], [f"127.0.0.{index}" for index in range(2, 250)]


@pytest.mark.parametrize(
    ("kind", "encrypted", "hosts"),
    [
        ("silent", False, SAME),
        ("silent", True, OTHERS),
        ("dripping", True, SAME),
        ("dripping", False, OTHERS),
        ("half a handshake", True, SAME),
        ("half a handshake", True, OTHERS),
    ],
)
def test_a_known_peer_is_back_soon_among_many_strangers(
    linked, strangers, kind, encrypted, hosts
):
    pair = linked(encrypted)
    pair.begin()
    crowd = strangers(pair.listener.address, kind, encrypted, hosts)
    # Each of the latter costs this process both ends of a handshake.
    count = 200 if kind == "half a handshake" else STRANGERS
    crowd.come(count // 2)
    broken = time.monotonic()
    pair.proxy.cut()
    crowd.come(count // 2)
    pair.here.step_done(1)
    pair.there.wait_for_step(1)
    assert time.monotonic() - broken < BACK_SECONDS
    assert pair.proxy.connections > 1


def test_a_log_that_fails_keeps_nobody_out(pool, monkeypatch):
    monkeypatch.setattr(pending_connections, "RETRY_SECONDS", 0.01)

    def fail(line):
        raise OSError("no space left on device")

    with links.listening(log=fail, **SETTINGS) as listening:
        attack(listening.address, PLAIN, 5)  # few enough that each is logged
        gets_in(listening, pool, "generator:1")
        held(listening)


def gets_in(listening, pool, name):
    """A cluster that means well comes, and goes again."""
    coming = pool.submit(links.dial, listening.address, name, **SETTINGS)
    listening.accept(5.0).abort("done")
    coming.result(5.0).abort("done")


def leave(sock, is_reset):
    if is_reset:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def held(listening):
    """What this process has: descriptors, threads, KiB of memory."""
    wait_until(lambda: not len(listening._acceptor.pending))
    gc.collect()
    status = pathlib.Path("/proc/self/status").read_text()
    resident = int(status.partition("VmRSS:")[2].split()[0])
    return len(os.listdir("/proc/self/fd")), threading.active_count(), resident


def attack(address, kinds, count, kept=0):
    """Connects `count` times, and stays for the next `kept` connections."""
    here = []
    for number in range(count):
        sock = socket.create_connection(address, 5.0)
        with contextlib.suppress(OSError):  # it was refused already
            sock.sendall(kinds[number % len(kinds)]())
        here.append(sock)
        if len(here) > kept:
            leave(here.pop(0), is_reset=number % 3 > 0)
    for sock in here:
        leave(sock, is_reset=True)


NOTHING, GARBAGE = lambda: b"", lambda: b"GET / HTTP/1.1\r\nHost: example\r\n\r\n" * 3
UNEXPECTED = frames.encode(links.hello("generator:7"), 0, 0)[0]
PLAIN = [
    NOTHING,
    GARBAGE,
    lambda: opening()[:-7],
    lambda: opening(os.urandom(16), epoch=0),
    lambda: opening(os.urandom(16), epoch=2, acknowledged=3),  # of an unknown session
    lambda: opening(os.urandom(16)) + HELLO[:-5],
    lambda: opening(os.urandom(16)) + UNEXPECTED,
]
ENCRYPTED = [NOTHING, GARBAGE, opening, lambda: client_hello()[:100]]
MEMORY = 16 << 10  # KiB, of fragments: a pending that stayed takes more than 2 each


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_hostile_connections_of_tls_leave_nothing_behind(folder, tmp_path):
    certificates.issue_for_run(tmp_path, ["generator:0"])
    wrong = [
        tls.client_contexts(tmp_path / "generator-0"),  # of another authority
        tls.client_contexts(folder / "generator-1"),  # not expected
    ]
    said = []
    with listen(tls.server_contexts(folder / "discriminator"), said) as listening:

        def strangers():
            attack(listening.address, ENCRYPTED, 100, kept=10)
            for contexts in wrong:
                with contextlib.suppress(OSError):
                    raw = socket.create_connection(listening.address, 5.0)
                    name = "discriminator"
                    with contexts().wrap_socket(raw, server_hostname=name) as sock:
                        while sock.recv(1000):
                            pass

        strangers()
        before = held(listening)
        for _ in range(3):
            strangers()
        after = held(listening)
        assert after[:2] == before[:2]
        assert after[2] < before[2] + MEMORY
        assert not listening._sessions
    assert any("generator-1 was not expected" in line for line in said)


def test_who_is_silent_has_no_place_for_long(monkeypatch):
    monkeypatch.setattr(greeting, "PENDING_SECONDS", 0.2)
    said = []
    with (
        listen(None, said) as listening,
        socket.create_connection(listening.address, 5.0) as stranger,
    ):
        assert stranger.recv(1) == b""  # not before 5 s, else
    assert said == ["dropped a connection from 127.0.0.1: no session within 0.2 s"]


def test_a_flood_beyond_the_bound_drives_out_itself(pool, strangers, monkeypatch):
    monkeypatch.setattr(pending_connections, "MOST", 50)
    with listen(None, []) as listening:
        strangers(listening.address, "silent", False, SAME).come(200)
        gets_in(listening, pool, "generator:0")
        assert len(listening._acceptor.pending) <= 50


def test_without_free_descriptors_strangers_go_and_the_peer_still_gets_in(strangers):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with listen(None, []) as listening:
        strangers(listening.address, "silent", False, SAME).come(20)
        wait_until(lambda: len(listening._acceptor.pending) >= 20)
        coming = [socket.socket() for _ in range(6)]
        used = max(map(int, os.listdir("/proc/self/fd")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1, hard))
        try:
            for sock in coming:
                sock.connect(listening.address)
            for sock in coming:
                sock.sendall(opening(os.urandom(16)))
                assert sock.recv(4) == integrity.CHECKSUMS.magic
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for sock in coming:
            sock.close()


def test_a_session_that_was_lost_as_it_began_may_begin_again():
    said = []
    with links.listening(log=said.append) as listening:
        ours = os.urandom(16)
        with socket.create_connection(listening.address, 5.0) as first:
            first.sendall(opening(ours) + HELLO)
        link = listening._came.get(timeout=5.0)
        wait_until(lambda: link.is_over)
        with socket.create_connection(listening.address, 5.0) as second:
            second.sendall(opening(ours, epoch=2) + HELLO)
            here = listening.accept(5.0)
            assert here.peer.cluster == "generator:0"
            assert here is not link
            here.abort("done")
    assert not said
