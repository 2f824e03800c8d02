import concurrent.futures
import contextlib
import os
import re
import resource
import socket
import threading

import pytest

from nebula_jax import errors
from nebula_jax.runtime.ranks import rendezvous

ANSWER = {"service": 7}


def meet(*others, processes=3, timeout=10.0, described=None, rubbish=b""):
    """Lets the root gather others, each (rank, processes, described).

    Returns:
      What each of them, the root first, returned or raised.
    """
    server = socket.create_server(("127.0.0.1", 0))
    address = server.getsockname()
    if rubbish:
        with socket.create_connection(address) as stranger:
            stranger.sendall(rubbish)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        root = pool.submit(
            rendezvous.gather,
            server,
            processes,
            described or {"--seed": 0},
            ANSWER,
            timeout,
        )
        rest = []
        for other in others:
            rest.append(pool.submit(rendezvous.attend, address, *other, timeout))
        return [each.exception(30) or each.result() for each in (root, *rest)]


SEED = {"--seed": 0}


def test_all_get_the_roots_answer_and_keep_a_line():
    (lines, answer), first, second = meet((1, 3, {"--seed": 0}), (2, 3, {"--seed": 0}))
    assert answer == ANSWER
    assert lines.keys() == {1, 2}
    for rank, (line, answer) in enumerate((first, second), 1):
        assert answer == ANSWER
        line.send({"from": rank})
        assert lines[rank].read(5) == {"from": rank}
        lines[rank].close()
        assert line.read(5) is None


def test_something_else_at_the_port_is_ignored():
    for rubbish in (b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b'{"rank": "1"}\n', b"\0" * 9):
        (lines, _), _ = meet((1, 2, {"--seed": 0}), processes=2, rubbish=rubbish)
        assert lines.keys() == {1}


def test_who_is_silent_or_slow_at_the_port_keeps_nobody_waiting(monkeypatch):
    """Each would else take its time, one after the other, up to --connect_timeout."""
    monkeypatch.setattr(rendezvous, "HELLO_SECONDS", 60.0)
    server = socket.create_server(("127.0.0.1", 0))
    address, ending = server.getsockname(), threading.Event()

    def trickle(sock):
        while not ending.wait(0.01):
            sock.sendall(b"x")

    with contextlib.ExitStack() as stack:
        strangers = [
            stack.enter_context(socket.create_connection(address)) for _ in range(8)
        ]
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor())
        slow = pool.submit(trickle, strangers[0])
        root = pool.submit(rendezvous.gather, server, 2, SEED, ANSWER, 30.0)
        line, answer = rendezvous.attend(address, 1, 2, SEED, 30.0)
        ending.set()
        assert slow.exception(30) is None
        (lines, _) = root.result(30)
        assert answer == ANSWER
        for each in (line, *lines.values()):
            each.close()


def test_who_does_not_describe_itself_in_time_is_closed(monkeypatch):
    monkeypatch.setattr(rendezvous, "HELLO_SECONDS", 0.05)
    server = socket.create_server(("127.0.0.1", 0))
    with (
        socket.create_connection(server.getsockname()) as stranger,
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):
        root = pool.submit(rendezvous.gather, server, 2, SEED, ANSWER, 30.0)
        stranger.settimeout(20)
        assert stranger.recv(1) == b""
        line, _ = rendezvous.attend(server.getsockname(), 1, 2, SEED, 30.0)
        (lines, _) = root.result(30)
        for each in (line, *lines.values()):
            each.close()


def test_a_meeting_may_have_more_descriptors_than_select_takes():
    """As of a thousand processes, each of which keeps a line to the root."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    null = os.open(os.devnull, os.O_RDONLY)
    held = [null, *(os.dup(null) for _ in range(1024))]
    try:
        (lines, _), (line, answer) = meet((1, 2, SEED), processes=2)
        assert answer == ANSWER
        for each in (line, *lines.values()):
            each.close()
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_of_too_many_who_do_not_describe_themselves_the_oldest_is_closed(monkeypatch):
    monkeypatch.setattr(rendezvous, "HELLO_SECONDS", 60.0)
    monkeypatch.setattr(rendezvous, "MOST_PENDING", 2)
    server = socket.create_server(("127.0.0.1", 0))
    address = server.getsockname()
    with contextlib.ExitStack() as stack:
        strangers = [
            stack.enter_context(socket.create_connection(address)) for _ in range(3)
        ]
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor())
        root = pool.submit(rendezvous.gather, server, 2, SEED, ANSWER, 30.0)
        strangers[0].settimeout(20)
        assert strangers[0].recv(1) == b""
        for each in strangers[1:]:
            each.settimeout(0.1)
            with pytest.raises(TimeoutError):
                each.recv(1)
        line, _ = rendezvous.attend(address, 1, 2, SEED, 30.0)
        (lines, _) = root.result(30)
        for each in (line, *lines.values()):
            each.close()


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
def test_processes_of_different_runs_are_refused(others, words):
    for found in meet(*others):
        assert isinstance(found, errors.SettingsError)
        assert str(found).startswith(words)


def test_processes_that_do_not_come_are_named():
    for found in meet((2, 4, SEED), processes=4, timeout=2.0):
        assert isinstance(found, rendezvous.Absent)
        words = "processes 1, 3 of 4 did not come within 2 s (connect_timeout)"
        assert str(found) == words


def test_a_coordinator_that_is_not_there_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    words = f"nobody answers at coordinator=127.0.0.1:{address[1]} within 0.3 s"
    with pytest.raises(rendezvous.Absent, match=re.escape(words)):
        rendezvous.attend(address, 1, 2, {}, 0.3)


def test_a_coordinator_of_ipv6_is_named_as_it_was_given():
    words = re.escape("nobody answers at coordinator=[::1]:9 within 0.1 s")
    with pytest.raises(rendezvous.Absent, match=words):
        rendezvous.attend(("::1", 9), 1, 2, {}, 0.1)


def test_a_root_that_is_there_and_waits_for_others_has_not_ended(monkeypatch):
    """It was started later, and so waits for longer."""
    monkeypatch.setattr(rendezvous, "HELLO_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        words = (
            f"the process at coordinator=127.0.0.1:{address[1]} did not answer within"
            " 0.1 s (connect_timeout): it may still wait for others"
        )
        with pytest.raises(rendezvous.Absent, match=re.escape(words)):
            rendezvous.attend(address, 1, 3, {}, 0.1)


def test_a_root_that_ends_before_it_answers_is_named():
    server = socket.create_server(("127.0.0.1", 0))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        found = pool.submit(rendezvous.attend, server.getsockname(), 1, 2, {}, 5.0)
        sock, _ = server.accept()
        sock.close()
        with server, pytest.raises(rendezvous.Absent, match="has ended"):
            found.result(10)
