"""The command doctor: on a folder alone, and on two labs whose switches run."""

import socket

import nebula_command
import pytest
import two_labs

from nebula_jax.federation import inner, joining
from scripts.federation import doctor


def examined(lab, *more):
    path = lab.folder.path
    return nebula_command.run("doctor", "--federation", path, *more)


def where(address):
    return f"{address[0]}:{address[1]}"


def test_a_lab_without_a_switch_is_in_order_but_for_it(lab):
    found = lab("doctor", status=1)
    wrong = [line for line in found.out.splitlines() if not line.startswith("ok")]
    assert wrong.pop(0).startswith("note   key of its root: ")
    assert wrong[0].startswith("wrong  switch: ")
    assert "nebula switch" in wrong[0]
    assert wrong[1:] == ["1 to look at"]
    for what in ("certificate of the switch", "revocation list", "audit log"):
        assert f"\nok     {what}: " in found.out


def test_without_a_lab_it_names_the_way_to_one(tmp_path):
    found = nebula_command.run("doctor", "--federation", tmp_path / "none")
    assert found.status == 1
    assert "begin with `nebula init`" in found.out
    assert found.out.endswith("1 to look at\n")


def test_two_labs_that_are_connected_are_in_order(labs):
    """The one that has joined looks where it joined; no line is cut by that."""
    state = labs.t.switch.state
    line = state.lines["lab-s"]
    found = examined(labs.t)
    assert found.status == 0, found
    assert found.out.endswith("all is in order\n"), found
    at = where(labs.s.address)
    assert "ok     line to lab-s: for " in found.out
    assert f"ok     {at}: answers after " in found.out
    assert "certificate of lab-s, for 5.0 d" in found.out
    assert "ok     clocks: this machine's is " in found.out
    assert "wrong" in examined(labs.t, "--peer", f"lab-u={at}").out  # this is lab-s
    assert examined(labs.s).status == 0
    assert state.lines["lab-s"] is line
    assert not line.is_closed
    assert labs.s.switch.state.lines["lab-t"].is_closed is False
    for each in (labs.s.folder, labs.t.folder):
        assert each.running_switch.read_text() not in found.out + examined(labs.s).out


def test_who_only_looks_at_a_switch_is_refused_nothing(tmp_path, stack):
    """Where certificates are issued, and elsewhere: requests are refused there."""
    first = two_labs.found(tmp_path / "s")
    s = two_labs.Running(first, listens=True)
    stack.callback(s.stop)
    folder = two_labs.join(tmp_path / "t", first, s.address)
    t = two_labs.Running(folder, listens=True, peers=[s.peer])
    stack.callback(t.stop)
    for lab, name, other in ((t, "lab-s", s), (s, "lab-t", t)):
        looked = examined(lab, "--peer", f"{name}={where(other.address)}")
        assert f"{where(other.address)}: TLS after " in looked.out
    with pytest.raises(joining.JoinError, match="authority is at another lab"):
        joining.clock_ahead(where(t.address))
    for each in (s, t):
        two_labs.wait_until(lambda each=each: not each.switch._entrance._pending)
    stack.close()
    (refused,) = (each for each in s.lines + t.lines if "refused" in each)
    assert refused.startswith("refused a connection from 127.0.0.1: none: ")


@pytest.mark.parametrize("hours", [25, -25])
def test_a_clock_that_is_a_day_off_is_named(labs, monkeypatch, hours):
    """Every certificate would be too old, or too new, for no reason of its own."""
    answer, line = joining.answer, labs.t.switch.state.lines["lab-s"]
    beat = line._beat

    def answered(*given):  # the authority
        found = dict(answer(*given))
        if "time" in found:
            found["time"] -= 3600 * hours
        return found

    def beating():  # a switch, once a second
        return beat() | {"time": beat()["time"] + 3600 * hours}

    monkeypatch.setattr(joining, "answer", answered)
    monkeypatch.setattr(line, "_beat", beating)
    there, here = ("ahead of", "behind")[:: 1 if hours > 0 else -1]
    found = examined(labs.t)
    assert f"wrong  clocks: this machine's is 1.0 d {there} that one" in found.out
    assert found.status == 1
    words = f"wrong  clocks: this machine's is 1.0 d {here} lab-t's: set the wrong one"
    two_labs.wait_until(lambda: words in examined(labs.s).out)


def test_a_line_that_is_not_there_is_named_with_the_reason(tmp_path):
    with two_labs.two_labs(tmp_path) as labs:
        two_labs.wait_until((labs.s.folder.audit / "peers" / "lab-t.seen").exists)
        labs.t.stop()
        two_labs.wait_until(lambda: not labs.s.switch.state.lines)
        found = examined(labs.s)
        assert "wrong  line to lab-t: none at present: is its switch run" in found.out
        labs.t.restart(labs.s)
        labs.s.wait_for_line("lab-t")
        s = labs.s.folder.path
        assert not nebula_command.run("revoke", "lab-t", "--federation", s).status
        for lab, whose in ((labs.s, "of lab-t"), (labs.t, "of this lab")):
            words = f": none: the certificate {whose} was revoked"
            two_labs.wait_until(lambda lab=lab, w=words: w in examined(lab).out)
        labs.s.stop()
        labs.s.__init__(labs.s.folder, listens=True)
        assert "none at present: it was revoked on" in examined(labs.s).out


def test_who_waits_for_a_lab_without_a_line_is_told_what_to_do(labs):
    """As at a third lab, whose one line leads to the authority's alone."""
    path, about = labs.t.folder.path, {"job": "m3", "lab": "lab-u"}

    def dial(**fields):
        dialing = about | {"from": "generator:0", "to": "discriminator"} | fields
        with pytest.raises(inner.Absent):
            inner.request(labs.t.folder, 20.0, "dial", **dialing)

    dial()
    serving = about | {"from": "discriminator", "port": 1, "shared": False}
    with inner.request(labs.t.folder, 20.0, "serve", **serving)[0]:
        words = "no line to lab-u: is its switch running? one of both needs --listen,"
        waits = [
            f"generator:0 of job m3: waits for discriminator: {words} the other",
            f"discriminator of job m3: waits for others of lab-u: {words} the other",
        ]
        shown = nebula_command.run("status", "--federation", path).out
        found = examined(labs.t)
        for each in waits:
            assert each in shown
            assert f"wrong  {each}" in found.out
        assert found.out.endswith("2 to look at\n"), found
    dial(lab="lab-s")  # to which there is a line: its run has not begun
    found = examined(labs.t)
    assert "note   generator:0 of job m3: waits for discriminator: " in found.out
    assert found.out.endswith("all is in order\n"), found


def said_of(lab, address):
    """What it says of an address that is not the other lab's."""
    found = examined(lab, "--peer", f"lab-x={address}")
    assert found.status == 1
    return found.out


def test_an_address_where_the_other_lab_is_not(labs, tmp_path, monkeypatch, pool):
    assert "nobody.invalid:7070: no machine has" in said_of(
        labs.s, "nobody.invalid:7070"
    )
    assert nebula_command.run("doctor", "--peer", "x").status == 2
    other = two_labs.Running(two_labs.found(tmp_path / "x"), listens=True)
    assert "no TLS with it (unknown_authority)" in said_of(labs.t, where(other.address))
    other.stop()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = where(listening.getsockname())

        def answer():
            sock, _ = listening.accept()
            with sock:
                sock.recv(1 << 12)
                sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        answered = pool.submit(answer)
        assert ": no TLS with it (plaintext): " in said_of(labs.s, address)
        answered.result(two_labs.SECONDS)
        monkeypatch.setattr(doctor, "SECONDS", 0.3)  # and now it does not answer
        assert "something else listens there" in said_of(labs.s, address)
    said = said_of(labs.s, address)
    assert f"wrong  {address}: nothing listens there: run nebula" in said
