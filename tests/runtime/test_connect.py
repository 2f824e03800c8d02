import re
import threading

import pytest

from nebula_jax import errors
from nebula_jax.communication import bridge
from nebula_jax.communication.wire import frames
from nebula_jax.runtime import connect, launcher, process


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"connect_timeout": 0.0}, "--connect_timeout=0: must be above 0 seconds"),
        ({"peer_timeout": float("inf")}, "--peer_timeout=inf: must be above 0"),
        ({"reconnect_timeout": -1.0}, "--reconnect_timeout=-1: must not be negative"),
        ({"stuck_timeout": -1.0}, "--stuck_timeout=-1: must not be negative"),
        ({"stuck_timeout": float("nan")}, "--stuck_timeout=nan: must not be negative"),
        ({"wan": "fast"}, "cannot read 'fast'"),
        ({"listen": "h:99999"}, "--listen=h:99999: expected HOST:PORT"),
        ({"peer": "nowhere"}, "--peer=nowhere: expected HOST:PORT"),
    ],
)
def test_settings_that_cannot_work_are_refused(values, words):
    with pytest.raises(errors.NebulaError, match=re.escape(words)):
        connect.Settings(**values)


@pytest.mark.parametrize(
    ("cluster", "values", "words"),
    [
        ("g:0", {}, "--cluster=g:0 needs --peer=HOST:PORT of the d"),
        ("all", {"peer": "h:1"}, "--peer is for a g, not for --cluster=all"),
        ("d", {"peer": "h:1"}, "--peer is for a g"),
        ("d", {}, "--cluster=d needs --listen=HOST:PORT"),
        ("g:0", {"peer": "h:1", "tls": "auto"}, "needs --tls=FOLDER with its"),
        ("g:0", {"peer": "h:1", "tls": "/nowhere"}, "/nowhere"),
        ("all", {}, None),
        ("d", {"listen": "h:1"}, None),
        ("g:0", {"peer": "h:1"}, None),
    ],
)
def test_a_cluster_must_have_what_it_needs_to_meet_the_others(cluster, values, words):
    settings = connect.Settings(**values)
    if words is None:
        connect.check_role(settings, cluster, "d", "g")
        return
    with pytest.raises(errors.NebulaError, match=re.escape(words)):
        connect.check_role(settings, cluster, "d", "g")


@pytest.mark.parametrize(
    ("value", "address"),
    [
        ("[::1]:70", ("::1", 70)),
        ("[::]:7070", ("::", 7070)),
        ("[fe80::1%eth0]:7070", ("fe80::1%eth0", 7070)),
        ("10.0.0.1:0", ("10.0.0.1", 0)),
        ("a.example.org:65535", ("a.example.org", 65535)),
    ],
)
def test_addresses_are_read_and_written_alike(value, address):
    assert connect.host_and_port("peer", value) == address
    assert bridge.written(address) == value


@pytest.mark.parametrize(
    "value",
    [
        "h:²",
        "h:٧",
        "h:+7",
        "h:" + "9" * 5000,
        "::1:7070",
        "[::1:7070",
        "[h]:7070",
        "[]:7070",
        "[[::1]]:70",
        "h h:7",
        ":7",
        "h:",
    ],
)
def test_what_is_no_address_is_refused(value):
    words = f"--listen={value}: expected HOST:PORT"
    with pytest.raises(errors.SettingsError, match=re.escape(words)):
        connect.host_and_port("listen", value)


def hello(name, steps=9):
    return frames.Hello(name, "1", {"--steps": steps}, ())


def meet(names, wanted, steps=9, first=None):
    """Lets clusters dial a listener that waits for `wanted`; returns their names."""
    has_failed = threading.Event()
    with connect.listening_socket(connect.Settings()) as probe:
        port = probe.getsockname()[1]
    address = f"127.0.0.1:{port}"

    def dial(name):
        if first not in (name, None):
            has_failed.wait(20)
        settings = connect.Settings(peer=address, connect_timeout=20)
        try:
            with connect.dial(settings, hello(name, steps), peer="d") as link:
                link.wait_for_welcome(20)
        except errors.NebulaError:
            has_failed.set()  # the listener's own error is what is tested

    threads = [threading.Thread(target=dial, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    try:
        settings = connect.Settings(listen=address, connect_timeout=20)
        with connect.listen(settings, hello("d"), wanted) as links:
            for link in links:
                link.welcome(0)
            return [link.peer.cluster for link in links]
    finally:
        for thread in threads:
            thread.join(30)


def test_links_are_in_the_order_that_was_wanted():
    assert meet(["g:1", "g:0"], ["g:0", "g:1"]) == ["g:0", "g:1"]


def test_who_is_not_expected_is_refused_and_the_waiting_goes_on(monkeypatch):
    said = []
    monkeypatch.setattr(process, "message", said.append)
    assert meet(["g:7", "g:0"], ["g:0"], first="g:7") == ["g:0"]
    assert "refused a connection from 127.0.0.1: g:7 was not expected" in said


def test_who_did_not_come_is_named():
    settings = connect.Settings(connect_timeout=0.2)
    words = "g:0, g:1 did not come within 0.2 s (--connect_timeout)"
    refused = pytest.raises(bridge.ConnectError, match=re.escape(words))
    with refused, connect.listen(settings, hello("d"), ["g:0", "g:1"]):
        pass


def test_a_run_that_anybody_can_read_says_so_once(capsys, monkeypatch):
    """The launcher, or each cluster of its own machine."""
    with launcher.prepared(["d", "g:0"], connect.Settings(tls="off")):
        pass
    assert capsys.readouterr().err == connect.PLAIN + "\n"
    meet(["g:0"], ["g:0"])
    assert capsys.readouterr().err.count(connect.PLAIN) == 2
    monkeypatch.setenv(process.LIFELINE_FD, "0")  # as a launched cluster
    meet(["g:0"], ["g:0"])
    assert connect.PLAIN not in capsys.readouterr().err


def test_an_encrypted_run_is_silent_about_it(capsys):
    with launcher.prepared(["d", "g:0"], connect.Settings(tls="auto")):
        pass
    assert capsys.readouterr().err == ""
