import concurrent.futures
import datetime
import selectors
import socket
import time

import pytest
import two_contexts

from nebula_jax.communication.wire import frames, greeting
from nebula_jax.security import tls
from nebula_jax.security.tls import certificates, credentials

RECORD = b"\x16\x03\x01\x00\x04abcd"
SESSION = b"sixteen bytes id"


@pytest.fixture
def ends():
    here, there = socket.socketpair()
    with here, there:
        yield greeting.set_up(here), there


def finish(steps, sock, seconds=2.0):
    return greeting.run(steps, sock, time.monotonic() + seconds, seconds)


def test_tls_begins_when_the_whole_record_has_come_and_leaves_it_there(ends):
    here, there = ends
    steps = greeting.client_hello(here)
    for byte in RECORD[:-1]:
        assert next(steps) == selectors.EVENT_READ
        there.send(bytes([byte]))
    there.send(RECORD[-1:] + b"more")
    finish(steps, here)
    assert here.recv(100) == RECORD + b"more"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"GET / HTTP/1.1", "begins no TLS"),
        (b"\x16\x03\x01\xff\xff", "a record of 65535 bytes"),
        (RECORD[:3], "closed the connection before a handshake"),
        (RECORD[:7], "closed the connection before a handshake"),
        (b"", "closed the connection before a handshake"),
    ],
)
def test_what_begins_no_handshake_is_an_error(ends, data, words):
    here, there = ends
    there.sendall(data)
    there.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionError, match=words):
        finish(greeting.client_hello(here), here)


def test_silence_is_given_up_without_patience_and_at_the_deadline(ends):
    here, _ = ends
    for deadline, patience in ((10.0, 0.05), (0.05, 10.0)):
        start = time.monotonic()
        steps = greeting.read_opening(greeting.Connected(here))
        with pytest.raises(TimeoutError, match="nothing came for"):
            greeting.run(steps, here, start + deadline, patience)
        assert time.monotonic() - start < 5.0


def test_both_ends_of_a_handshake_refuse_a_certificate_of_ten_years(
    tmp_path, monkeypatch
):
    """OpenSSL lets it pass, and who shows it has switched its own check off."""
    monkeypatch.setattr(certificates, "LIFETIME", datetime.timedelta(days=3650))
    certificates.issue_for_run(tmp_path, ["discriminator", "generator:0"])
    with monkeypatch.context() as lax:
        lax.setattr(credentials, "check", lambda *given: None)
        server = tls.server_contexts(tmp_path / "discriminator")()
        client = tls.client_contexts(tmp_path / "generator-0")()
    with (
        two_contexts.connected(server, client) as ends,
        concurrent.futures.ThreadPoolExecutor(2) as pool,
    ):
        for each in [
            pool.submit(finish, greeting.shake_hands(sock), sock, 10.0) for sock in ends
        ]:
            with pytest.raises(credentials.CredentialsError, match=r"for 365[01] days"):
                each.result()


def test_a_refusal_is_sent_and_read_before_the_end(ends):
    here, there = ends
    there.sendall(b"x" * 1000)
    steps = greeting.refuse(greeting.Connected(here), "not today")
    assert next(steps) == selectors.EVENT_READ  # the peer has not left yet
    assert b"not today" in there.recv(1000)
    there.close()
    finish(steps, here)


def test_an_opening_is_one_frame_and_no_more(ends):
    here, there = ends
    data = frames.encode(frames.Open(SESSION, 4), 0, 7)[0]
    there.sendall(data + b"more")
    opened = finish(greeting.read_opening(greeting.Connected(here)), here)
    assert opened == (frames.Open(SESSION, 4), 7)
    assert here.recv(100) == b"more"
