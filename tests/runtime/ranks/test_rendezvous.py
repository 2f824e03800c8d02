"""The door of a cluster, and the rendezvous behind it."""

import contextlib
import os
import re
import resource
import socket

import ports
import pytest
from two_labs import wait_until

from nebula_jax import errors
from nebula_jax.communication import endpoints
from nebula_jax.communication.wire import json_lines
from nebula_jax.runtime.ranks import rendezvous
from nebula_jax.security import shared_secret

SECRET = b"s" * 32
SEED = {"--seed": 0}
PROOF = {"number": 1, "purpose": "rendezvous", "challenge": "0" * 64, "proof": "0" * 64}


@pytest.fixture
def opened():
    """Opens doors, which are closed in the end; returns them and their addresses."""
    doors = []

    def make(host="127.0.0.1"):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server = socket.create_server((host, 0), family=family)
        address = server.getsockname()[:2]
        made = rendezvous.Door(server, SECRET, endpoints.written(address))
        doors.append(made)
        return made, address

    yield make
    for each in doors:
        if not each.acceptor.is_closed:
            each.acceptor.close()


@pytest.fixture
def meet(opened, pool):
    """Lets the root gather others, each (rank, processes, described); returns what each
    of them, the root first, returned or raised."""

    def run(*others, processes=3, timeout=10.0, host="127.0.0.1"):
        door, address = opened(host)
        root = pool.submit(rendezvous.gather, door, processes, SEED, timeout)
        rest = []
        for rank, *other in others:
            given = address, SECRET, rank, *other, timeout
            rest.append(pool.submit(rendezvous.attend, *given))
        return [each.exception(30) or each.result() for each in (root, *rest)]

    return run


def close(*lines):
    for each in lines:
        each.close()


def read_line(sock):
    sock.settimeout(20)
    return json_lines.read(sock)


needs_ipv6 = pytest.mark.skipif(not ports.has_ipv6(), reason="this host has no IPv6")


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def test_all_get_the_roots_answer_and_keep_a_line(meet, host):
    lines, first, second = meet((1, 3, SEED), (2, 3, SEED), host=host)
    assert lines.keys() == {1, 2}
    for rank, line in enumerate((first, second), 1):
        line.send({"from": rank})
        assert lines[rank].read(5) == {"from": rank}
        lines[rank].close()
        assert line.read(5) is None
        line.close()


# What strangers do.


def silent(address, stack):
    stack.enter_context(socket.create_connection(address))


def garbage(address, stack):
    sock = stack.enter_context(socket.create_connection(address))
    with contextlib.suppress(OSError):
        sock.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0" * 9 + b"\n")
        said = sock.makefile("rb").readlines()
        assert len(said) <= 1  # the challenge, which tells nothing


def endless(address, stack):
    sock = stack.enter_context(socket.create_connection(address))
    with contextlib.suppress(OSError):
        sock.sendall(b"{" * (1 << 20))


def describes_itself(address, stack):
    """What was enough before there were proofs."""
    sock = stack.enter_context(socket.create_connection(address))
    sock.sendall(b'{"rank":1,"processes":2,"described":{}}\n')
    assert "challenge" in read_line(sock)
    assert read_line(sock) == shared_secret.REFUSED
    assert sock.recv(1) == b""


def wrong_secret(address, stack):
    for purpose in (shared_secret.RENDEZVOUS, shared_secret.SERVICE):
        sock = stack.enter_context(socket.create_connection(address))
        where = endpoints.written(address)
        claim = shared_secret.claim(b"x" * 32, where, 1, purpose, read_line(sock))
        sock.sendall(json_lines.encode(claim[1]))
        assert read_line(sock) == shared_secret.REFUSED
        assert sock.recv(1) == b""


def replays(address, stack):
    """Sends what a process of this cluster has said on an earlier connection."""
    sock = stack.enter_context(socket.create_connection(address))
    where, asked = endpoints.written(address), shared_secret.challenge()
    _, message = shared_secret.claim(SECRET, where, 1, shared_secret.RENDEZVOUS, asked)
    assert read_line(sock) != asked
    sock.sendall(json_lines.encode(message))
    assert read_line(sock) == shared_secret.REFUSED


def reflects(address, stack):
    """Gives one connection's challenge to the other, and each its own."""
    one, other = (
        stack.enter_context(socket.create_connection(address)) for _ in range(2)
    )
    asked = read_line(one)["challenge"], read_line(other)["challenge"]
    for sock, challenge in zip((one, other), asked[::-1], strict=True):
        sock.sendall(json_lines.encode(PROOF | {"challenge": challenge}))
        assert read_line(sock) == shared_secret.REFUSED


STRANGERS = [silent, garbage, endless, describes_itself]
STRANGERS += [wrong_secret, replays, reflects]


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_stranger_reads_changes_and_ends_nothing(opened, pool, stranger, monkeypatch):
    """Before the others come, while some are there, and while they run."""
    monkeypatch.setattr(rendezvous, "HELLO_SECONDS", 60.0)
    door, address = opened()
    with contextlib.ExitStack() as stack:
        stranger(address, stack)
        root = pool.submit(rendezvous.gather, door, 3, SEED, 30.0)
        first = pool.submit(rendezvous.attend, address, SECRET, 1, 3, SEED, 30.0)
        stranger(address, stack)
        assert not root.done()
        second = rendezvous.attend(address, SECRET, 2, 3, SEED, 30.0)
        lines, first = root.result(30), first.result(30)
        assert lines.keys() == {1, 2}
        stranger(address, stack)
        for rank, line in ((1, first), (2, second)):
            line.send({"at": rank})
            assert lines[rank].read(5) == {"at": rank}
        close(first, second, *lines.values())


def test_who_proves_nothing_in_time_is_closed(opened, monkeypatch):
    monkeypatch.setattr(rendezvous, "HELLO_SECONDS", 0.05)
    door, address = opened()
    with socket.create_connection(address) as stranger:
        read_line(stranger)
        assert stranger.recv(1) == b""
    wait_until(lambda: not len(door.acceptor.pending))


def test_who_comes_with_the_secret_when_all_are_there_tries_again(opened, pool):
    """As a process that was started again, before the root has ended too."""
    door, address = opened()
    root = pool.submit(rendezvous.gather, door, 2, SEED, 30.0)
    line = rendezvous.attend(address, SECRET, 1, 2, SEED, 30.0)
    words = "within 0.5 s .*: all of its processes are there already"
    with pytest.raises(rendezvous.Absent, match=words):
        rendezvous.attend(address, SECRET, 1, 2, SEED, 0.5)
    close(line, *root.result(30).values())


def test_the_service_is_reached_by_the_door_alone_and_with_the_secret(opened, tmp_path):
    door, address = opened()

    def knock(secret, purpose=shared_secret.SERVICE):
        return rendezvous.knock(address, secret, 1, purpose, 0.0)

    with pytest.raises(ConnectionError):  # there is none yet
        knock(SECRET)
    with socket.socket(socket.AF_UNIX) as service:
        service.bind(str(tmp_path / "s"))
        service.listen()
        service.settimeout(20)
        door.service = str(tmp_path / "s")
        with pytest.raises(shared_secret.OtherSecret):
            knock(b"x" * 32)
        with knock(SECRET) as sock, service.accept()[0] as reached:
            for one, other in ((sock, reached), (reached, sock)):
                one.sendall(b"hello")
                other.settimeout(20)
                assert other.recv(5) == b"hello"
        service.settimeout(0.1)
        with pytest.raises(TimeoutError):  # nobody else has reached it
            service.accept()


def test_a_process_with_another_secret_ends_with_words_and_no_root(opened, pool):
    door, address = opened()
    root = pool.submit(rendezvous.gather, door, 2, SEED, 1.0)
    words = "give all processes of the cluster the same coordinator, and the same work"
    with pytest.raises(errors.SettingsError, match=words):
        rendezvous.attend(address, b"x" * 32, 1, 2, SEED, 30.0)
    with pytest.raises(rendezvous.Absent, match="; 1 connections came without this"):
        root.result(30)


def test_a_process_says_nothing_to_a_false_root(pool):
    """Who listens at the address before the root does learns a rank, and no more."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        found = pool.submit(rendezvous.attend, address, SECRET, 1, 2, SEED, 1.0)
        sock, _ = server.accept()
        with sock:
            sock.sendall(json_lines.encode(shared_secret.challenge()))
            assert read_line(sock).keys() == PROOF.keys()
            sock.sendall(json_lines.encode({"proof": "0" * 64}))
            sock.settimeout(20)
            assert sock.recv(1) == b""
        server.close()
        with pytest.raises(rendezvous.Absent, match="nobody answers"):
            found.result(30)


def test_a_rendezvous_may_have_more_descriptors_than_select_takes(meet):
    """As of a thousand processes, each of which keeps a line to the root."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    null = os.open(os.devnull, os.O_RDONLY)
    held = [null, *(os.dup(null) for _ in range(1024))]
    try:
        lines, line = meet((1, 2, SEED), processes=2)
        close(line, *lines.values())
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ([(1, 3, SEED), (1, 3, SEED)], "process 1 of the cluster is there twice: each"),
        ([(3, 3, SEED)], "process 3 of the cluster is there twice"),
        ([(1, 4, SEED)], "process 1 of the cluster has num_processes=4, process 0 3"),
        ([(1, 3, {"--seed": 7})], "process 1 of the cluster has --seed=7, process 0 0"),
        ([(1, 3, {})], "process 1 of the cluster has --seed=None, process 0 0"),
        (
            [(1, 3, SEED | {"x": "y\n"})],
            "process 1 of the cluster has x=y\N{REPLACEMENT CHARACTER},",
        ),
    ],
)
def test_processes_of_different_runs_are_refused(meet, others, words):
    for found in meet(*others):
        assert isinstance(found, errors.SettingsError)
        assert str(found).startswith(words)


def test_processes_that_do_not_come_are_named(meet):
    for found in meet((2, 4, SEED), processes=4, timeout=2.0):
        assert isinstance(found, rendezvous.Absent)
        words = "processes 1, 3 of 4 did not come within 2 s (connect_timeout)"
        assert str(found) == words


def test_a_coordinator_that_is_not_there_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    words = f"nobody answers at coordinator=127.0.0.1:{address[1]} within 0.3 s"
    with pytest.raises(rendezvous.Absent, match=re.escape(words)):
        rendezvous.attend(address, SECRET, 1, 2, {}, 0.3)


def test_a_root_that_is_there_and_waits_for_others_has_not_ended(
    opened, pool, monkeypatch
):
    """It was started later, and so waits for longer."""
    monkeypatch.setattr(rendezvous, "HELLO_SECONDS", 0.5)
    door, address = opened()
    root = pool.submit(rendezvous.gather, door, 3, SEED, 3.0)
    words = (
        f"the process at coordinator=127.0.0.1:{address[1]} did not answer within"
        " 0.1 s (connect_timeout): it may still wait for others"
    )
    with pytest.raises(rendezvous.Absent, match=re.escape(words)):
        rendezvous.attend(address, SECRET, 1, 3, SEED, 0.1)
    with pytest.raises(rendezvous.Absent):
        root.result(30)


def test_a_root_that_ends_before_it_answers_is_named(opened, pool):
    door, address = opened()
    found = pool.submit(rendezvous.attend, address, SECRET, 1, 2, SEED, 5.0)
    _, line, _ = door.came.get(timeout=20)
    line.close()
    with pytest.raises(rendezvous.Absent, match="has ended"):
        found.result(10)
