import concurrent.futures
import contextlib
import dataclasses
import re
import shutil
import socket
import threading
import time
import types

import links
import ports
import pytest
from breakable_line import Proxy

from nebula_jax import errors
from nebula_jax.communication import bridge, endpoints
from nebula_jax.communication.wire import frames
from nebula_jax.federation import inner
from nebula_jax.runtime import connect
from nebula_jax.runtime.connect.all_clusters import connected
from nebula_jax.runtime.life import launcher, process
from nebula_jax.security import tls
from nebula_jax.security.membership import site_folder
from nebula_jax.security.tls import certificates, credentials


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"connect_timeout": 0.0}, "connect_timeout=0: must be above 0 seconds"),
        ({"peer_timeout": float("inf")}, "peer_timeout=inf: must be above 0"),
        ({"reconnect_timeout": -1.0}, "reconnect_timeout=-1: must not be negative"),
        ({"stuck_timeout": -1.0}, "stuck_timeout=-1: must not be negative"),
        ({"stuck_timeout": float("nan")}, "stuck_timeout=nan: must not be negative"),
        ({"wan": "fast"}, "cannot read 'fast'"),
        ({"listen": "h:99999"}, "listen=h:99999: expected HOST:PORT"),
        ({"peer": "nowhere"}, "peer=nowhere: expected HOST:PORT"),
        ({"peer": "h:1,nowhere"}, "peer=nowhere: expected HOST:PORT"),
        ({"federation": "f", "job": "a/b"}, "job=a/b: expected up to 64 letters"),
        ({"federation": "f", "peer": "lab-s,lab-u"}, "give the job its labs in policy"),
        (
            {"federation": "f", "job": f"nebula1.{'a' * 16}"},
            "job: the name reads like an invitation",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(values, words):
    with pytest.raises(errors.NebulaError, match=re.escape(words)):
        connect.Settings(**values)


def hello(name, details=None):
    return frames.Hello(name, "1", {"--steps": 9}, (), details or {})


def meet(pool, names, wanted, first=None):
    """Lets clusters dial a listener that waits for `wanted`; returns their names."""
    has_failed = threading.Event()
    address = f"127.0.0.1:{ports.free_port()}"

    def dial(name):
        if first not in (name, None):
            has_failed.wait(20)
        settings = connect.Settings(peer=address, connect_timeout=20)
        try:
            with connected(settings, hello(name), ["d", name]) as peers:
                peers.links["d"].wait_for_welcome(20)
        except errors.NebulaError:
            has_failed.set()  # the listener's own error is what is tested

    dialing = [pool.submit(dial, name) for name in names]
    settings = connect.Settings(listen=address, connect_timeout=20)
    with connected(settings, hello("d"), ["d", *wanted]) as peers:
        for link in peers.links.values():
            link.welcome(0)
    concurrent.futures.wait(dialing, 30)
    return [link.peer.cluster for link in peers.links.values()]


def test_who_is_not_expected_is_refused_and_the_waiting_goes_on(pool, monkeypatch):
    said = []
    monkeypatch.setattr(process, "message", said.append)
    assert meet(pool, ["g:7", "g:0"], ["g:0"], first="g:7") == ["g:0"]
    assert "refused a connection from 127.0.0.1: g:7 was not expected" in said


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("credentials")
    certificates.issue_for_run(folder, ["d", "g:0", "g:1"])
    return folder


@pytest.fixture
def over_a_line(monkeypatch, folder, pool):
    """Lets one cluster dial another over a breakable line, with TLS or "off"; returns
    the messages of both, and the line, once the connector came in."""

    def over_a_line(kind, disturb, patience=0.5, details=None):
        there, here = (
            {"tls": kind if kind == "off" else str(folder / name)}
            for name in ("g-0", "d")
        )
        monkeypatch.setattr(bridge, "SILENT_SECONDS", patience)
        said = []
        monkeypatch.setattr(process, "message", said.append)
        listening = connect.listening_socket(connect.Settings())
        proxy = Proxy(listening.getsockname())
        monkeypatch.setattr(connect, "listening_socket", lambda settings: listening)
        disturb(proxy)

        def dial():
            peer = endpoints.written(proxy.address)
            settings = connect.Settings(peer=peer, connect_timeout=30.0, **there)
            ours = hello("g:0", details)
            with connected(settings, ours, ["d", "g:0"]) as peers:
                peers.links["d"].wait_for_welcome(10)

        dialing = pool.submit(dial)
        settings = connect.Settings(connect_timeout=30.0, **here)
        ours = hello("d", details)
        with connected(settings, ours, ["d", "g:0"]) as peers:
            peers.links["g:0"].welcome(0)
        dialing.result(30)
        proxy.close()
        return said, proxy

    return over_a_line


# TLS: its first record up, its length, and what the certificates are in, both ways.
# Plain: head, header and payload of Open and Hello.
DAMAGE = {
    ("tls", "up"): (0, 4, 1500),
    ("tls", "down"): (2, 1100),
    ("off", "up"): (0, 30, 90, 160),
    ("off", "down"): (0, 160),
}


@pytest.mark.parametrize(
    ("kind", "direction", "offset"),
    [(*way, offset) for way, offsets in DAMAGE.items() for offset in offsets],
)
def test_a_damaged_first_connection_is_not_the_last_one(
    over_a_line, kind, direction, offset
):
    _, proxy = over_a_line(kind, lambda proxy: proxy.flip_at(direction, offset))
    assert proxy.flipped == 1


@pytest.mark.parametrize(
    ("kind", "patience", "rate", "details", "least"),
    [
        ("tls", 2.5, 1000, 0, 2.5),
        ("tls", 2.5, 9_000, 27_000, 5.0),
        ("off", 0.5, 27_000, 27_000, 1.0),
    ],
)
def test_a_slow_line_keeps_its_place_as_long_as_bytes_come(
    over_a_line, kind, patience, rate, details, least
):
    """In a handshake; and while one's own Hello leaves, as one of a corpus of many
    files: 27 kB. That takes longer than a handshake's patience, and nothing comes: the
    listener's follows only then.
    """
    fingerprints, start = {"fingerprints": "x" * details}, time.monotonic()
    said, proxy = over_a_line(
        kind, lambda proxy: proxy.limit(rate), patience, fingerprints
    )
    assert time.monotonic() - start > least
    assert not [line for line in said if line != connect.PLAIN]
    assert proxy.connections == 1


def test_who_has_answered_is_not_reported_as_nobody(monkeypatch):
    """A listener whose Hello does not come: the line takes what follows its Open."""
    session = bytes(16)
    drawn = types.SimpleNamespace(token_bytes=lambda count: session)
    monkeypatch.setattr(bridge, "secrets", drawn)
    here, there = socket.socketpair()
    words = "no session with d at .* after 0.3 s .*: its Hello did not come: no"
    with there:
        for buffer in frames.encode(frames.Open(session, 1), 0, 0):
            there.sendall(buffer)
        with pytest.raises(bridge.NobodyThere, match=words):
            links.dial(
                ("127.0.0.1", 1),
                hello("g:0"),
                "d",
                connect_timeout=0.3,
                peer_timeout=1.0,
                route=lambda seconds: (here, "d"),
            )


@pytest.mark.parametrize(
    ("there", "words"),
    [
        ("other/g-0", "no TLS with d at 127.0.0.1:.*certificate verify failed"),
        ("ours/g-1", "g-1"),
        ("unknown/g-0", "no TLS with d at .*unknown ca"),
    ],
)
def test_what_only_a_person_can_mend_is_reported_soon(
    tmp_path, monkeypatch, there, words
):
    """Another authority, another cluster's credentials, an authority unknown there."""
    for run in ("ours", "other"):
        certificates.issue_for_run(tmp_path / run, ["d", "g:0", "g:1"])
    shutil.copytree(tmp_path / "other", tmp_path / "unknown")
    # Its own certificate is not looked at, as in a program that is not ours.
    monkeypatch.setattr(credentials, "check", lambda *given: None)
    ours, theirs = (
        credentials.load(tmp_path / run / "g-0") for run in ("ours", "unknown")
    )
    mixed = certificates.pem(theirs.key, theirs.certificate, ours.authority)
    (tmp_path / "unknown" / "g-0" / credentials.FILE).write_bytes(mixed)
    start = time.monotonic()
    server = tls.server_contexts(tmp_path / "ours" / "d")
    with links.listening(hello("d"), tls=server, clusters=["g:0"]) as listening:
        address = endpoints.written(listening.address)
        settings = connect.Settings(
            peer=address, tls=str(tmp_path / there), connect_timeout=30.0
        )
        refused = pytest.raises(errors.NebulaError, match=words)
        with refused, connected(settings, hello("g:0"), ["d", "g:0"]):
            pass
    assert time.monotonic() - start < 15.0


def test_a_line_that_damages_everything_is_the_last_reason_given(monkeypatch):
    monkeypatch.setattr(bridge, "RETRY_SECONDS", 1.0)  # so the last is no short one
    with connect.listening_socket(connect.Settings()) as listening:
        is_over = threading.Event()
        answering = threading.Thread(target=answer_badly, args=(listening, is_over))
        answering.start()
        said = []
        more = {"connect_timeout": 2.6, "log": said.append}
        with pytest.raises(
            bridge.ConnectError,
            match=r"no session with d at .* after 2.6 s .connect_timeout.: .*damaged",
        ):
            links.dial(listening.getsockname(), hello("g:0"), "d", **more)
        is_over.set()
        answering.join(10)
    assert len(said) == 1  # the same reason again is no news
    assert said[0].endswith("trying again")


def answer_badly(listening, is_over):
    listening.settimeout(0.1)
    while not is_over.is_set():
        with contextlib.suppress(TimeoutError):
            sock, _ = listening.accept()
            sock.sendall(b"HTTP/1.1 400 Bad Request\r\n" * 5)
            sock.recv(1 << 16)
            sock.close()


def test_a_run_that_anybody_can_read_says_so_once(tmp_path, capsys, monkeypatch, pool):
    """The launcher, or each cluster of its own machine; nobody if it is encrypted."""
    for where, words in (("auto", ""), ("off", connect.PLAIN + "\n")):
        with launcher.prepared(tmp_path, ["d", "g:0"], connect.Settings(tls=where)):
            pass
        assert capsys.readouterr().err == words
    meet(pool, ["g:0"], ["g:0"])
    assert capsys.readouterr().err.count(connect.PLAIN) == 2
    monkeypatch.setenv(process.LIFELINE_FD, "0")  # as a launched cluster
    meet(pool, ["g:0"], ["g:0"])
    assert connect.PLAIN not in capsys.readouterr().err


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_trainer_listens_where_it_reaches_its_switch_and_nowhere_else(host, tmp_path):
    folder = site_folder.Folder(tmp_path)
    inner.write(folder, inner.Address(host, 7080, "token"))
    settings = connect.Settings(federation=str(tmp_path), job="m3")
    with connect.listening_socket(settings) as listening:
        assert listening.getsockname()[0] == host
    folder.socket.symlink_to(tmp_path / "users.sock")
    with connect.listening_socket(settings) as listening:
        assert listening.getsockname()[0] == "127.0.0.1"
    given = dataclasses.replace(settings, listen="127.0.0.2:0")
    with connect.listening_socket(given) as listening:
        assert listening.getsockname()[0] == "127.0.0.2"
