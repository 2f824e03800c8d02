"""Trainers of two labs over two switches: what they exchange, and what stops them."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import datetime
import fcntl
import functools
import json
import os
import random
import shutil
import socket
import ssl
import sys
import threading
import time
import types

import breakable_line
import host_users
import nebula_command
import ports
import pytest
import tiny_accounts
import two_labs
from lab_exchange import discriminate, exchange, generate, rotate, run, values
from lab_folders import at
from two_labs import wait_until

from nebula_jax import errors
from nebula_jax.communication import endpoints
from nebula_jax.communication.wire import frames, json_lines
from nebula_jax.federation import (
    inner,
    joining,
    line,
    outside,
    requests,
    server,
    switch_client,
    upkeep,
)
from nebula_jax.security import (
    accounts,
    audit,
    policy,
    private_files,
    seal,
    shared_secret,
    store,
)
from nebula_jax.security.audit import counts as audit_counts
from nebula_jax.security.audit import entries as audit_entries
from nebula_jax.security.audit import log as audit_log
from nebula_jax.security.membership import (
    authority,
    checkup,
    invitations,
    member,
    revocation,
    site_folder,
)
from nebula_jax.security.tls import between_labs, credentials


@pytest.mark.parametrize("ends", ["st", "ts", "tt"])
def test_trainers_of_two_labs_meet_and_exchange_or_of_one(labs, ends):
    """The dialing switch may be at either trainer, or both trainers at one switch."""
    listening, dialing = (getattr(labs, each) for each in ends)
    exchange(listening, dialing, job=f"ends-{ends}")


def test_a_cut_line_costs_nothing_but_time(labs):
    def gate(step):
        if step in (5, 10, 15):
            for each in (labs.s, labs.t):
                for line in list(each.switch.state.lines.values()):
                    each.loop.call_soon_threadsafe(line.close, "cut by a test")
                    break

    exchange(labs.s, labs.t, gate=gate, job="cut")


def test_a_switch_that_is_started_anew_costs_nothing_but_time(labs):
    begun = threading.Event()

    def gate(step):
        if step == 5:
            labs.t.restart(labs.s)
            begun.set()

    tokens, failed = run(labs.t, labs.s, gate=gate, job="restart")
    assert begun.is_set()
    assert not failed
    assert tokens == list(range(1, 21))
    wait_until(lambda: not labs.t.switch.state.in_flight)
    frames_of_tokens = [
        entry.what["frames"]
        for entry in two_labs.entries(labs.t.switch.state)
        if entry.kind == "stream"
        and (entry.what["job"], entry.what["kind"]) == ("restart", "tokens")
    ]
    assert len(frames_of_tokens) == 2  # of the stream that the stop cut, and the next
    assert sum(frames_of_tokens) >= 20


@contextlib.contextmanager
def labs_that_dial_each_other(path):
    """Yields Labs that both listen and dial; lab-t comes first."""
    first = two_labs.found(path / "s")
    with contextlib.ExitStack() as stack:
        s = two_labs.Running(first, listens=True, port=ports.free_port())
        stack.callback(s.stop)
        folder = two_labs.join(path / "t", first, s.address)
        s.stop()
        t = two_labs.Running(folder, listens=True, peers=[s.peer])
        stack.callback(t.stop)
        s.__init__(first, listens=True, peers=[t.peer], port=s.address[1])
        yield two_labs.Labs(s, t)


LOOKS = 50  # of 10 ms and more, in each of which both switches have their turn


def wait_for_a_line_that_lasts(labs, but=()):
    """Returns both ends of the line, once neither lab has another one for LOOKS."""
    seen = []

    def has_lasted():
        found = [
            lab.call(lambda lab=lab: list(lab.switch.state.lines.values()))
            for lab in (labs.s, labs.t)
        ]
        if not are_ends_of_one(*found, but) or (seen and seen[-1] != found):
            seen.clear()
        else:
            seen.append(found)
        return len(seen) >= LOOKS

    wait_until(has_lasted)
    return [one for (one,) in seen[-1]]


def are_ends_of_one(here, there, but):
    """True if two labs have one line alone, with each other, and none of `but`."""
    if len(here) != 1 or len(there) != 1:
        return False
    ends = (*here, *there)
    one, other = (each._writer.get_extra_info for each in ends)
    return (
        not any(each.is_closed or each in but for each in ends)
        and one("sockname") == other("peername")
        and one("peername") == other("sockname")
    )


def connections(lab):
    return sum(each.startswith("connected with") for each in lab.lines)


def test_two_switches_that_dial_each_other_keep_one_line(tmp_path):
    with labs_that_dial_each_other(tmp_path) as labs:
        lines = wait_for_a_line_that_lasts(labs)
        assert [each.is_dialer for each in lines].count(True) == 1
        for lab in (labs.s, labs.t):
            lab.run(lab.switch.upkeep.rotate())
            lines = wait_for_a_line_that_lasts(labs, but=lines)
        labs.s.loop.call_soon_threadsafe(lines[0].close, "cut by a test")
        wait_for_a_line_that_lasts(labs, but=lines)
        assert max(connections(each) for each in (labs.s, labs.t)) < 16
        exchange(labs.s, labs.t)


def test_of_lines_dialed_at_once_both_labs_keep_the_same_one(tmp_path, monkeypatch):
    dial, both, dialed = outside.dial, threading.Barrier(2), []
    standing = server.Switch._standing

    async def at_once(folder, lab, address):
        made = await dial(folder, lab, address)
        if folder.path not in dialed:
            dialed.append(folder.path)
            await asyncio.to_thread(both.wait, 60)
        return made

    def of_both(self, *given):  # who was dialed first dials as well
        return standing(self, *given) if len(dialed) == 2 else None

    monkeypatch.setattr(server.outside, "dial", at_once)
    monkeypatch.setattr(server.Switch, "_standing", of_both)
    monkeypatch.setattr(line, "SILENCE_SECONDS", 60.0)  # until the other has dialed
    with labs_that_dial_each_other(tmp_path) as labs:
        lines = wait_for_a_line_that_lasts(labs)
        assert len(dialed) == 2
        assert [each.is_dialer for each in lines] == [True, False]  # lab-s has


def test_two_addresses_of_one_lab_make_one_line(tmp_path):
    with two_labs.two_labs(tmp_path) as labs:
        labs.t.stop()
        labs.t.__init__(labs.t.folder, peers=[labs.s.peer] * 2)
        wait_for_a_line_that_lasts(labs)


def test_both_logs_have_the_same_bytes_of_each_kind(labs):
    _, failed = run(labs.s, labs.t, job="counted")
    assert not failed
    wait_until(lambda: not labs.s.switch.state.in_flight)
    wait_until(lambda: not labs.t.switch.state.in_flight)
    folders = [each.folder.audit for each in (labs.s, labs.t)]
    for each in (labs.s, labs.t):
        each.call(each.switch.state.audit.commit)
    counted = [
        {
            (entry.what["direction"], entry.what["kind"]): entry.what["bytes"]
            for entry in audit_entries.read(folder)
            if entry.kind == "stream" and entry.what["job"] == "counted"
        }
        for folder in folders
    ]
    tensors = 20 * (frames.frame_bytes(frames.Tensor, 128, seal.Seal(bytes(32))))
    assert counted[1]["sent", "tokens"] == tensors
    other = {"sent": "received", "received": "sent"}
    assert counted[0] == {
        (other[direction], kind): count
        for (direction, kind), count in counted[1].items()
    }
    differences = audit_counts.reconcile(*folders)
    assert not [each for each in differences if each.startswith("job counted,")]


def test_a_policy_that_was_written_in_two_parts_is_read_whole(labs):
    """Between them it is no JSON, and the times of both may be the same tick."""
    path = labs.t.folder.path / policy.FILE

    def write(text):
        new = path.with_name("new")
        new.write_text(text)
        os.utime(new, (1e9, 1e9))
        os.replace(new, path)

    text = '{"jobs": {"strict": {"kinds": ["other"]}}}'
    before = len(labs.t.lines)
    write(text[:10])
    wait_until(lambda: any("error: " in each for each in labs.t.lines[before:]))
    write(text)
    wait_until(lambda: labs.t.switch.state.rules._jobs)
    path.unlink()
    wait_until(lambda: not labs.t.switch.state.rules._jobs)


@contextlib.contextmanager
def policy_of(lab, jobs):
    """Lets a lab's policy.json bound jobs."""
    path = lab.folder.path / policy.FILE
    path.write_text(json.dumps({"jobs": jobs}))
    wait_until(lambda: lab.switch.state.rules._jobs)
    yield
    path.unlink()
    wait_until(lambda: not lab.switch.state.rules._jobs)


def test_a_kind_that_the_policy_does_not_name_never_crosses(labs):
    with policy_of(labs.t, {"strict": {"kinds": ["other"]}}):
        tokens, failed = run(labs.s, labs.t, job="strict", reconnect_timeout=2.0)
    assert not tokens
    assert any("tokens may not cross for job strict" in str(each) for each in failed)


def test_a_lab_that_may_not_be_a_cluster_is_refused_by_trainers_too(labs):
    with policy_of(labs.t, {"mine": {"labs": {"discriminator": ["lab-u"]}}}):
        _, failed = run(labs.s, labs.t, job="mine", connect_timeout=2.0)
    assert any("lab-s may not be discriminator" in str(each) for each in failed)


def patience(sock):
    """Seconds after which the kernel gives up a silent connection; 0 for two hours."""
    if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE):
        return 0
    idle, pause, probes = (
        sock.getsockopt(socket.IPPROTO_TCP, option)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    )
    return idle + pause * probes


def patiences(lab):
    """Those of all connections of a switch, by the address of the other end."""
    found = {}
    for key in lab.loop._selector.get_map().values():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(key.fd)) as sock:
            found[sock.getpeername()] = patience(sock)
    return found


def test_a_host_that_vanishes_is_noticed_on_every_silent_connection(labs):
    """A trainer keeps no place, and waits for no switch: 60 s without a line end it."""
    listening = endpoints.listen(("127.0.0.1", 0))
    made = switch_client.Trainer(labs.s.folder, "silent", "discriminator", "")
    dialing = switch_client.Trainer(labs.s.folder, "silent", "generator:0", "")
    made.serve(listening.getsockname()[1])
    sock, _ = dialing.reach("discriminator")(5.0)
    carried, _ = listening.accept()
    ends = [made._serving, sock]
    found = labs.s.call(patiences, labs.s)
    all_ = [patience(each) for each in ends]
    all_ += [found[each.getsockname()] for each in ends]
    all_ += [found[listening.getsockname()]]
    all_ += [
        patience(each.switch.state.lines[lab]._writer.get_extra_info("socket"))
        for each, lab in ((labs.s, "lab-t"), (labs.t, "lab-s"))
    ]
    assert len(all_) == 7
    assert all(0 < each < 30 for each in all_), all_
    for each in (sock, carried, listening, made, dialing):
        each.close()


NO_LINE = (joining.JoinError, inner.Refused)


def test_certificates_are_replaced_in_flight_and_no_frame_is_lost(labs):
    turns = []

    def gate(step):
        for each in (labs.s, labs.t):
            with contextlib.suppress(*NO_LINE):  # at this moment
                rotate(each)
                turns.append(step)

    exchange(labs.s, labs.t, gate=gate, job="rotated")
    assert len(turns) >= 20


def altered(rng, data):
    data = bytearray(data)
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return [bytes(data)]


def forged():
    message = frames.Tensor(0, 1, 0, [values(666).tobytes()])
    return b"".join(map(bytes, frames.encode(message, 1, 0, seal.Seal(bytes(32)))))


WICKED = {
    "altered": altered,
    "dropped": lambda rng, data: [],
    "repeated": lambda rng, data: [data, data],
    "cut": lambda rng, data: [data[: len(data) // 2]],
    "reordered": lambda rng, data: [data[len(data) // 2 :], data[: len(data) // 2]],
    "forged": lambda rng, data: [forged(), data],
    "reflected": None,
}


@pytest.mark.parametrize("kind", WICKED)
def test_what_a_switch_does_to_frames_changes_no_number(labs, kind):
    """A switch that means ill: sealed frames are found damaged, and sent again."""
    send = line.Stream.send
    rng, changed = random.Random(3), []

    async def wicked(self, data):
        if b"NEBS" not in data or len(changed) >= 4 or rng.random() > 0.2:
            await send(self, data)
            return
        changed.append(len(data))
        if kind == "reflected":
            self._take(data)  # back to who sent it
            return
        for each in WICKED[kind](rng, data):
            await send(self, each)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(line.Stream, "send", wicked)
        more = {"peer_timeout": 2.0}  # what was dropped is missed by then
        tokens, failed = run(labs.s, labs.t, job=f"wicked-{kind}", **more)
    assert changed
    assert not failed
    assert tokens == list(range(1, 21))


def test_a_line_between_switches_that_damages_bytes_changes_no_number(tmp_path):
    first = two_labs.found(tmp_path / "s")
    s = two_labs.Running(first, listens=True)
    proxy = breakable_line.Proxy(s.address)
    folder = two_labs.join(tmp_path / "t", first, s.address)
    t = two_labs.Running(folder, peers=[("lab-s", proxy.address)])
    try:
        t.wait_for_line("lab-s")
        # After each handshake that is damaged too, the pause is longer.
        proxy.flip(40_000, breakable_line.UP, breakable_line.DOWN)
        tokens, failed = run(s, t, steps=200, seconds=120)
        assert proxy.flipped
        assert not failed
        assert tokens == list(range(1, 201))
    finally:
        proxy.close()
        t.stop()
        s.stop()


def test_a_switch_cannot_join_streams_of_different_jobs(labs):
    """What it announces as another job is found out by the trainers themselves."""
    about = requests.streams.About

    def renamed(cls, *values, **fields):
        made = about(*values, **fields)
        return made._replace(job="other" if made.job == "mixed" else made.job)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(requests.streams, "About", functools.partial(renamed, None))
        failed, seen = [], []

        def listen():
            with contextlib.suppress(errors.NebulaError):
                discriminate(labs.s, 3, seen, job="other", connect_timeout=4.0)

        thread = threading.Thread(target=listen)
        thread.start()
        try:
            generate(labs.t, 3, [], job="mixed", connect_timeout=3.0)
        except errors.NebulaError as error:
            failed.append(error)
        thread.join(30)
    assert failed
    assert not seen


def test_a_lab_without_a_list_that_serves_gets_one(tmp_path):
    with two_labs.two_labs(tmp_path) as labs:
        labs.t.stop()
        labs.t.folder.list_of("switch").write_text("")
        labs.t.__init__(labs.t.folder, peers=[labs.s.peer])
        labs.t.wait_for_line("lab-s")
        assert "the revocation list is new" in labs.t.lines


def test_an_invitation_serves_once_for_its_lab_within_its_hour(tmp_path):
    first = two_labs.found(tmp_path / "s")
    s = two_labs.Running(first, listens=True)
    try:
        where = f"{s.address[0]}:{s.address[1]}"
        issuer = authority.LocalAuthority(first)
        text = issuer.invite("lab-t", where)
        invitation = invitations.parse(text)
        folder = site_folder.Folder
        other = dataclasses.replace(invitation, lab="lab-u")
        guessed = dataclasses.replace(invitation, secret=bytes(32))
        forged = dataclasses.replace(invitation, fingerprint="0" * 64)
        for wrong, words in (
            (other, "for another lab"),
            (guessed, "refused"),
            (forged, "fingerprint"),
        ):
            with pytest.raises(errors.NebulaError, match=words):
                joining.join(folder(tmp_path / "wrong"), wrong)
        joining.join(folder(tmp_path / "t"), invitation)
        with pytest.raises(joining.JoinError, match="refused"):
            joining.join(folder(tmp_path / "again"), invitation)
        past = site_folder.utc_now() - datetime.timedelta(hours=1, minutes=1)
        late = at(past, invitations.parse, at(past, issuer.invite, "lab-u", where))
        with pytest.raises(joining.JoinError, match="expired"):
            joining.join(folder(tmp_path / "late"), late)
    finally:
        s.stop()


def test_a_lab_whose_certificates_have_expired_joins_again_in_its_folder(tmp_path):
    first = two_labs.found(tmp_path / "s")
    s = two_labs.Running(first, listens=True)
    t = None
    try:
        folder = two_labs.join(tmp_path / "t", first, s.address)
        issuer = authority.LocalAuthority(first)
        where = f"{s.address[0]}:{s.address[1]}"
        with audit_log.Log(folder.audit, "lab-t") as log:
            kept = log.verifier
        invitation = invitations.parse(issuer.invite("lab-t", where))
        two_labs.expire(folder, issuer)
        with pytest.raises(
            credentials.CredentialsError, match="a running `nebula switch`"
        ):
            member.load(folder, "switch")
        other = invitations.parse(issuer.invite("lab-u", where))
        with pytest.raises(errors.NebulaError, match="lab lab-t is here already"):
            joining.join(folder, other)
        joining.join(folder, invitation)
        # As if that had been stopped in the middle.
        folder.credentials("trainer").unlink()
        joining.join(folder, invitations.parse(issuer.invite("lab-t", where)))
        people = folder.people.rename(tmp_path / "accounts")  # had not begun yet
        joining.join(folder, invitations.parse(issuer.invite("lab-t", where)))
        people.rename(folder.people)
        t = two_labs.Running(folder, peers=[s.peer])
        t.wait_for_line("lab-s")
        assert t.switch.state.audit.verifier == kept
    finally:
        for each in (t, s):
            if each is not None:
                each.stop()


def reach(lab, to):
    """Dials a trainer of a lab; what the switch says."""
    about = {"job": "m3", "from": "generator:0", "to": "discriminator", "lab": to}
    with pytest.raises((inner.Refused, inner.Absent)) as error:
        inner.request(lab.folder, 20.0, "dial", **about)
    return error.value


def remembered(lab):
    """What a lab has witnessed, and the starts that trainers have shown each other."""
    witnessed = audit.paths(lab.folder.audit).peers.iterdir()
    (path,) = lab.folder.epochs.rglob("generator-0.json")
    return {each: each.read_bytes() for each in (*witnessed, path)}


def test_a_revoked_lab_is_told_so_and_comes_back_in_its_folder(tmp_path, monkeypatch):
    """By the command, which keeps what it has witnessed and its incarnations."""
    dialed, looks, dial, may_dial = [], [], outside.dial, threading.Event()

    async def counted(*given):
        dialed.append(given)
        while not may_dial.is_set():
            await asyncio.sleep(0.01)
        return await dial(*given)

    async def sleep(seconds):
        """Between attempts to dial, and looks if the certificate is new."""
        looks.append(len(dialed))
        await asyncio.sleep(0.01)

    own = types.SimpleNamespace(**vars(asyncio) | {"sleep": sleep})
    monkeypatch.setattr(server, "asyncio", own)
    monkeypatch.setattr(outside, "dial", counted)
    may_dial.set()
    with two_labs.two_labs(tmp_path) as labs:
        exchange(labs.s, labs.t, 3)
        wait_until(lambda: (labs.t.folder.audit / "peers" / "lab-s.seen").exists())
        issuer = authority.LocalAuthority(labs.s.folder)
        issuer.revoke("lab-t")
        listed = revocation.RevocationList(labs.s.folder)
        listed.accept(issuer.revocation_list()[1])
        where = endpoints.written(labs.s.address)
        told = labs.t.switch.state.no_line
        wait_until(lambda: told.get("lab-s") == server.REVOKED)
        assert "revoked" in str(reach(labs.t, "lab-s"))
        for to in ("lab-t", ""):
            error = reach(labs.s, to)
            assert isinstance(error, inner.Refused)  # it is not tried again
            assert "the certificate of lab-t was revoked" in str(error)
        for lab, words in ((labs.s, "of lab-t was"), (labs.t, "of this lab was")):
            found = requests.status(lab.switch.state, lab.switch.upkeep)
            assert words in str([each for each in found if each.state == checkup.WRONG])
        first, count = len(looks), len(dialed)
        wait_until(lambda: len(looks) > first + 20)
        assert len(dialed) == count  # it dials no more
        may_dial.clear()
        before = remembered(labs.t)
        text = issuer.invite("lab-t", where)
        given = ("join", where, "--name", "lab-t", "--federation", labs.t.folder.path)
        joined = nebula_command.run(*given, stdin=text)
        assert joined.status == 0, joined
        assert remembered(labs.t) == before
        may_dial.set()
        labs.t.wait_for_line("lab-s")
        wait_until(lambda: not labs.s.switch.state.gone)  # it may say so a bit later
        wait_until(lambda: not told)  # nor does its own status, beside the line
        exchange(labs.s, labs.t, 3)


def test_a_stolen_key_of_the_authoritys_lab_serves_until_that_joins_again(tmp_path):
    with two_labs.two_labs(tmp_path) as labs:
        stolen = member.renewal_request(labs.s.folder, "trainer")[1]
        der = ssl.PEM_cert_to_DER_cert(stolen.certificate.decode())
        issuer = authority.LocalAuthority(labs.s.folder)
        own = invitations.parse(issuer.invite("lab-s", "lab-s.example:7070"))
        there = dataclasses.replace(own, address=endpoints.written(labs.s.address))
        with pytest.raises(joining.JoinError, match="in its own folder alone"):
            joining.join(site_folder.Folder(tmp_path / "thief"), there)
        between_labs.check_peer(der, labs.t.folder)
        joining.join(labs.s.folder, own)
        assert not labs.s.folder.load().authority
        with pytest.raises(joining.JoinError, match="was revoked"):
            joining.ask(labs.t.folder, {"op": "renew", **stolen.fields()})
        wait_until(lambda: labs.t.switch.upkeep.number > 1)
        with pytest.raises(credentials.CredentialsError, match="was revoked"):
            between_labs.check_peer(der, labs.t.folder)
        wait_until(lambda: any("lab-s was revoked" in each for each in labs.t.lines))
        wait_until(lambda: not labs.t.switch.state.gone)  # it has new ones
        exchange(labs.s, labs.t, 3)


@pytest.mark.parametrize("ends", ["st", "ts"])
def test_trainers_end_at_once_when_a_lab_is_revoked_and_say_so(tmp_path, ends):
    with two_labs.two_labs(tmp_path) as labs:
        seconds = []

        def gate(step):
            if step == 3:
                issuer = authority.LocalAuthority(labs.s.folder)
                issuer.revoke("lab-t")
                listed = revocation.RevocationList(labs.s.folder)
                listed.accept(issuer.revocation_list()[1])
                began = time.monotonic()
                wait_until(lambda: not labs.s.switch.state.lines)
                seconds.append(time.monotonic() - began)

        listening, dialing = (getattr(labs, each) for each in ends)
        more = {"reconnect_timeout": 300.0}
        # More steps than there is time for: the revocation ends them.
        _, failed = run(listening, dialing, 10**6, gate=gate, seconds=60, **more)
        assert seconds[0] < 15.0  # on a busy machine; alone 0.3
        assert len(failed) == 2
        assert all("revoked" in str(each) for each in failed), failed
        assert not labs.s.switch.state.lines


def test_a_trainer_that_waits_says_that_the_other_lab_has_expired(
    tmp_path, monkeypatch
):
    """It may come back, so that is waited for."""

    async def refuse(*given):
        raise ConnectionRefusedError

    with two_labs.two_labs(tmp_path) as labs:

        def gate(step):
            if step == 3:
                monkeypatch.setattr(outside, "dial", refuse)
                lost = labs.s.switch.state.lines["lab-t"]
                lost.end = site_folder.utc_now()
                wait_until(lambda: lost.is_closed)

        _, failed = run(labs.s, labs.t, gate=gate, reconnect_timeout=1.0)
        words = "within 1 s (reconnect_timeout): the certificate of lab-t has expired"
        assert words in str(failed[0])


def test_a_trainer_from_an_older_copy_ends_at_once_with_the_reason(tmp_path, pool):
    with two_labs.two_labs(tmp_path) as labs:
        exchange(labs.s, labs.t, 3)
        (path,) = labs.t.folder.epochs.rglob("generator-0.json")
        with store.Store(path, ("own", "peers")).changing() as tables:
            tables["own"]["number"] -= 2
        tokens = []
        other = pool.submit(discriminate, labs.s, 3, tokens, connect_timeout=5.0)
        with pytest.raises(errors.NebulaError, match="incarnation"):
            generate(labs.t, 3, [], connect_timeout=60.0)
        assert isinstance(other.exception(30), errors.NebulaError)
        assert not tokens


def test_a_clone_that_runs_beside_its_trainer_is_refused(labs, tmp_path):
    """It has the folder, with key, certificate and numbers, and the switch's token."""
    exchange(labs.s, labs.t, 3, job="cloned")
    shutil.copy(labs.t.folder.settings, tmp_path)
    for each in (labs.t.folder.trainers, labs.t.folder.inside):
        shutil.copytree(each, tmp_path / each.name, symlinks=True)
    clone = types.SimpleNamespace(folder=site_folder.Folder(tmp_path))
    refused = []

    def gate(step):
        if step == 5:
            with pytest.raises(errors.NebulaError, match="or runs twice"):
                generate(clone, 3, [], job="cloned", connect_timeout=60.0)
            refused.append(step)

    exchange(labs.s, labs.t, gate=gate, job="cloned")
    assert refused


@pytest.mark.parametrize("where", ["s", "t"])
def test_a_line_that_cannot_begin_is_closed_with_the_reason(tmp_path, where):
    """What was seen of the other lab's log can be read by others: nothing is witnessed,
    so the line would be in the table, and move nothing."""
    with two_labs.two_labs(tmp_path) as labs:
        here = getattr(labs, where)
        other = {"s": "lab-t", "t": "lab-s"}[where]
        seen = here.folder.audit / "peers" / f"{other}.seen"
        wait_until(seen.exists)
        seen.chmod(0o640)
        cut = here.switch.state.lines[other]
        here.call(cut.close, "cut by a test")
        wait_until(lambda: any(seen.name in each for each in here.lines))
        assert not here.call(lambda: dict(here.switch.state.lines))
        assert any(f"refused a connection from {other}" in each for each in here.lines)
        wait_until(lambda: not labs.s.switch.state.lines)
        wait_until(lambda: not labs.t.switch.state.lines)
        seen.chmod(0o600)
        exchange(labs.s, labs.t)


def test_lines_that_end_at_once_are_dialed_less_and_less_often(tmp_path, monkeypatch):
    """Each is an entry in two logs. One that lasts begins the pauses anew."""
    folder, pauses = two_labs.found(tmp_path), []
    made = server.Switch(folder, print, two_labs.issuer_in_this_process(folder))
    clock = types.SimpleNamespace(  # of this switch: those of `labs` run on
        now=0.0, monotonic=lambda: clock.now, time=time.time
    )
    line_ = types.SimpleNamespace(
        lab="lab-t", wants_successor=asyncio.Event(), reason="it has ended"
    )

    async def dial(folder, lab, address):
        return None

    async def run_line(made):
        clock.now += 3600.0 if len(pauses) == 6 else 1.0

    async def sleep(seconds):
        pauses.append(seconds)
        if len(pauses) == 9:
            raise asyncio.CancelledError

    monkeypatch.setattr(server, "time", clock)
    monkeypatch.setattr(server.outside, "dial", dial)
    own = types.SimpleNamespace(**vars(asyncio) | {"sleep": sleep})
    monkeypatch.setattr(server, "asyncio", own)
    monkeypatch.setattr(made, "_line", lambda connection, is_dialer: line_)
    monkeypatch.setattr(made, "_run_line", run_line)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(made._keep_dialing("lab-t", ("127.0.0.1", 1)))
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 0.0, 0.1, 0.2]
    made.state.audit.close()


def test_lines_of_a_lab_that_come_and_go_are_a_few_entries(tmp_path, monkeypatch):
    """Whoever has a certificate could else make the log grow for ever."""
    made = server.Switch(two_labs.found(tmp_path), print)

    async def met(line_):
        return None

    async def run_line():
        return "the other switch closed the line"

    about = {"is_dialer": False, "serial": 1, "bytes_sent": 0, "bytes_received": 0}
    line_ = types.SimpleNamespace(lab="lab-t", run=run_line, **about)
    monkeypatch.setattr(made.upkeep, "met", met)

    async def come_and_go():
        for _ in range(300):
            await made._run_line(line_)

    asyncio.run(come_and_go())
    kinds = [each.kind for each in two_labs.entries(made.state)]
    assert 1 < kinds.count("session") < 40
    made.state.audit.close()


FEW = 4  # outside connections at a time


@pytest.fixture
def crowded(tmp_path, monkeypatch):
    """A switch that takes few outside connections at a time, and waits for them."""
    monkeypatch.setattr(outside, "MOST_PENDING", FEW)
    monkeypatch.setattr(outside, "PENDING_SECONDS", 60.0)
    monkeypatch.setattr(outside, "HANDSHAKE_SECONDS", 60.0)
    made = two_labs.Running(two_labs.found(tmp_path / "s"), listens=True)
    yield made
    made.stop()


def is_answered(lab):
    """True if the first attempt of who has no certificate yet is answered."""
    where = f"{lab.address[0]}:{lab.address[1]}"
    context = between_labs.unverified_context()
    return "authority" in joining._request(where, {"op": "authority"}, context, None)


def test_silent_connections_keep_no_lab_out_of_a_switch(crowded):
    with contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(crowded.address, 20))
            for _ in range(10 * FEW)
        ]
        assert is_answered(crowded)
        assert silent[0].recv(1) == b""
        silent[-1].setblocking(False)
        with pytest.raises(BlockingIOError):  # it may be an honest one
            silent[-1].recv(1)
    wait_until(lambda: any("too many others" in each for each in crowded.lines))


def test_connections_without_a_certificate_are_counted_until_their_end(crowded):
    with contextlib.ExitStack() as stack:
        silent = []
        for _ in range(FEW + 1):
            sock = stack.enter_context(socket.create_connection(crowded.address, 20))
            context = between_labs.unverified_context()
            silent.append(stack.enter_context(context.wrap_socket(sock)))
        with contextlib.suppress(ssl.SSLError):  # it was cut off
            assert silent[0].recv(1) == b""
        assert is_answered(crowded)
    assert crowded.call(lambda: len(crowded.switch._entrance._pending)) <= FEW
    wait_until(lambda: not crowded.call(lambda: len(crowded.switch._entrance._pending)))


def test_who_is_driven_out_as_its_line_begins_takes_no_place(labs, monkeypatch):
    """It would close the line of its lab that is there."""
    accept, before = outside.accept, labs.s.switch.state.lines["lab-t"]
    ended = []

    async def driven_out(folder, sock):
        made = await accept(folder, sock)
        ended.append(made.writer.transport)  # first: the other end may see it at once
        labs.s.switch._entrance.make_room()
        return made

    monkeypatch.setattr(outside, "accept", driven_out)
    monkeypatch.setattr(outside, "CONNECT_SECONDS", 20.0)  # it is dialed once
    with pytest.raises((EOFError, OSError)):
        asyncio.run(asyncio.wait_for(dialed(labs.t.folder, labs.s.peer), 20))
    assert len(ended) == 1
    wait_until(lambda: labs.s.call(ended[0].is_closing))
    assert labs.s.switch.state.lines["lab-t"] is before
    assert not before.is_closed


async def dialed(folder, peer):
    """What comes on a new line."""
    connection = await outside.dial(folder, *peer)
    return await connection.reader.readexactly(1)


def test_a_switch_whose_upkeep_fails_ends(tmp_path):
    """It would serve on, and enforce no revocation."""

    async def failing():
        raise ValueError("what nobody has thought of")

    made = server.Switch(two_labs.found(tmp_path / "s"), print)
    made.upkeep._look_at_files = failing
    inside = endpoints.listen(("127.0.0.1", 0))
    with pytest.raises(site_folder.FederationError, match="nobody has thought of"):
        asyncio.run(asyncio.wait_for(made.run(None, [], inside), 20))


OPENED = {"is_watched": False, "in_loop": []}
"""Files that were opened, and waits for a disk or a lock, in an event loop's thread."""


@sys.addaudithook
def watch(event, given):
    if OPENED["is_watched"] and event == "open" and asyncio._get_running_loop():
        OPENED["in_loop"].append(given[0])


def watched(call):
    """A call of the system that waits for what the descriptor in its arguments is."""

    def noted(descriptor, *given):
        if OPENED["is_watched"] and asyncio._get_running_loop():
            OPENED["in_loop"].append(os.readlink(f"/proc/self/fd/{descriptor}"))
        return call(descriptor, *given)

    return noted


def test_the_event_loop_waits_for_no_file(tmp_path, monkeypatch):
    """A disk or a lock that hangs would hold up every stream of the lab."""
    for name in ("write", "ftruncate", "fsync", "fdatasync"):
        monkeypatch.setattr(os, name, watched(getattr(os, name)))
    monkeypatch.setattr(fcntl, "flock", watched(fcntl.flock))
    with two_labs.two_labs(tmp_path) as labs:
        OPENED["is_watched"] = True
        try:
            exchange(labs.s, labs.t, gate=lambda step: step % 9 or rotate(labs.t))
            inner.ask(labs.s.folder, 20.0, "status")
            saved = {"event": "saved", "step": 1, "digest": "ab"}
            before = labs.s.switch.state.audit.cosigned("lab-t")
            inner.ask(labs.s.folder, 20.0, "record", kind="checkpoint", what=saved)
            log = labs.s.switch.state.audit
            wait_until(lambda: log.cosigned("lab-t") > before)
            (labs.t.folder.path / policy.FILE).write_text('{"jobs": {}}')
            wait_until(lambda: "policy.json was read again" in labs.t.lines)
            issuer = authority.LocalAuthority(labs.s.folder)
            issuer.admit("lab-u")
            issuer.revoke("lab-u")
            wait_until(lambda: labs.t.switch.upkeep.number > 1)
        finally:
            OPENED["is_watched"] = False
    assert not [each for each in OPENED["in_loop"] if str(tmp_path) in str(each)]


def test_a_disk_that_hangs_holds_up_no_stream(labs, monkeypatch):
    is_hanging, may_write, write = threading.Event(), threading.Event(), os.write

    def hanging(descriptor, data):
        is_hanging.set()
        assert may_write.wait(60)
        return write(descriptor, data)

    own = types.SimpleNamespace(**vars(os) | {"write": hanging})
    monkeypatch.setattr(audit_log, "os", own)
    found = labs.t.switch.state
    labs.t.call(found.record, "job", "owner")
    try:
        assert is_hanging.wait(20)
        exchange(labs.s, labs.t, job="hangs")
    finally:
        may_write.set()
    wait_until(lambda: not found.in_flight)
    jobs = {each.what.get("job") for each in two_labs.entries(found)}
    assert "hangs" in jobs


def test_a_lab_has_one_switch_at_a_time(labs, monkeypatch):
    monkeypatch.setattr(private_files, "LOCK_SECONDS", 0.05)
    with pytest.raises(audit.AuditError, match="a switch of this lab that runs alread"):
        server.Switch(labs.s.folder, print)


def test_nobody_without_the_token_of_the_switch_is_served(labs):
    found = inner.read(labs.s.folder)
    with socket.create_connection(found[:2], 20) as sock:
        asked = json_lines.read(sock)
        _, message = shared_secret.claim(b"x" * 43, repr(found), 1, "status", asked)
        sock.sendall(json_lines.encode(message))
        assert json_lines.read(sock) == shared_secret.REFUSED
        assert sock.recv(1) == b""


def test_who_is_silent_inside_keeps_no_trainer_out(labs, monkeypatch):
    monkeypatch.setattr(server, "MOST_UNPROVEN", 8)
    monkeypatch.setattr(inner, "REQUEST_SECONDS", 60.0)
    found = inner.read(labs.s.folder)
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(socket.create_connection(found[:2], 20))
        sock, answer = inner.request(labs.s.folder, 20.0, "status")
        sock.close()
        assert answer["lab"] == "lab-s"
        assert labs.s.call(lambda: len(labs.s.switch._unproven)) <= 8


def test_a_proof_is_for_one_request(labs):
    found = inner.read(labs.s.folder)
    secret = found.token.encode()
    with socket.create_connection(found[:2], 20) as sock:
        asked = json_lines.read(sock)
        claim, message = shared_secret.claim(secret, repr(found), 1, "status", asked)
        sock.sendall(json_lines.encode(message))
        shared_secret.check_listener(secret, claim, json_lines.read(sock))
        sock.sendall(json_lines.encode({"op": "rotate"}))
        assert "something else than was proven" in json_lines.read(sock)["error"]


def test_what_was_overheard_opens_nothing_and_no_false_switch_gets_a_token(
    labs, tmp_path
):
    """Once, who read one `status` could record, rotate and dial as the owner."""
    folder, heard = labs.s.folder, []
    found = inner.read(folder)
    false = site_folder.Folder(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:  # passes everything on
        inner.write(false, found._replace(port=server.getsockname()[1]))
        with concurrent.futures.ThreadPoolExecutor() as pool:
            asking = pool.submit(inner.request, false, 20.0, "status")
            with (
                server.accept()[0] as sock,
                socket.create_connection(found[:2], 20) as true,
            ):
                for one, other in ((true, sock), (sock, true), (true, sock)):
                    heard.append(json_lines.read(one))
                    other.sendall(json_lines.encode(heard[-1]))
                with pytest.raises(inner.NoSwitch, match=r"no switch of .* is at"):
                    asking.result(30)
    assert found.token not in json.dumps(heard)
    with socket.create_connection(found[:2], 20) as sock:
        assert json_lines.read(sock) != heard[0]
        sock.sendall(json_lines.encode(heard[1]))
        assert json_lines.read(sock) == shared_secret.REFUSED


def test_a_stranger_who_sends_nothing_costs_no_tls(labs, monkeypatch):
    """Neither keys nor lists are read before TLS begins."""
    made, context = [], between_labs.server_context
    monkeypatch.setattr(
        between_labs,
        "server_context",
        lambda *values, **more: made.append(1) or context(*values, **more),
    )
    with contextlib.ExitStack() as stack:
        for data in (b"", b"", b"GET / HTTP/1.0\r\n\r\n"):
            sock = stack.enter_context(socket.create_connection(labs.s.address, 10))
            sock.sendall(data)
        wait_until(lambda: any("begins no TLS" in each for each in labs.s.lines))
        assert not made


@pytest.mark.parametrize("data", [b"\n", b"{}\n", b"[" * 70_000, b"\xff\n"])
def test_what_is_no_request_is_answered_or_dropped(labs, data):
    found = inner.read(labs.s.folder)
    with socket.create_connection(found[:2], 10) as sock, contextlib.suppress(OSError):
        sock.sendall(data)
        assert b"stream" not in sock.recv(1000)
    assert labs.s.call(lambda: len(labs.s.switch.state.lines)) == 1


@pytest.mark.slow
def test_200_replacements_of_certificates_lose_no_frame(tmp_path):
    with two_labs.two_labs(tmp_path) as labs:

        def gate(step):
            for each in (labs.s, labs.t):
                rotate(each)

        exchange(labs.s, labs.t, steps=100, gate=gate, seconds=600)


def test_a_job_that_has_used_up_its_bytes_stops_also_after_a_restart(tmp_path):
    with (
        two_labs.two_labs(tmp_path) as labs,
        policy_of(labs.t, {"m3": {"bytes": 20000}}),
    ):
        tokens, failed = run(labs.s, labs.t, steps=400, reconnect_timeout=2.0)
        assert 0 < len(tokens) < 400
        assert tokens == list(range(1, len(tokens) + 1))
        assert any("used up its 20,000 bytes" in str(each) for each in failed)
        labs.t.restart(labs.s)
        tokens, failed = run(labs.s, labs.t, connect_timeout=2.0, reconnect_timeout=2.0)
        assert not tokens
        assert failed


def test_an_account_that_has_used_up_its_quota_is_barred_with_the_reason(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(upkeep, "SAVED_SECONDS", float("inf"))  # saved below
    with two_labs.two_labs(tmp_path) as labs:

        def limit(quota):
            people = labs.t.switch.state.people
            limits = accounts.Limits(quota_bytes=quota)
            people.set_limits("owner", limits)
            labs.t.run(labs.t.switch.upkeep.save_counts())

        def is_barred(job):
            tokens, failed = run(labs.s, labs.t, connect_timeout=2.0, job=job)
            assert not tokens
            return "quota of 1000 bytes over" in " ".join(map(str, failed))

        _, failed = run(labs.s, labs.t, steps=20)
        assert not failed
        limit(1000)
        assert is_barred("spent")
        labs.t.restart(labs.s)
        assert is_barred("restarted")
        assert labs.t.switch.state.charged["owner"] > 20 * values(1).nbytes
        limit(10**9)
        exchange(labs.s, labs.t)


def test_who_dials_a_trainer_whose_account_is_barred_gets_the_reason(
    labs, monkeypatch, tmp_path
):
    """People of its lab see whose quota it is; those of another lab see no name."""
    people = labs.s.switch.state.people
    tiny_accounts.person(people, "bob")
    bob = host_users.folder_of(monkeypatch, labs.s, tmp_path / "bob", "bob")

    def limit(quota):
        people.set_limits("bob", accounts.Limits(quota_bytes=quota))
        labs.s.run(labs.s.switch.upkeep.save_counts())

    def request(folder, op, cluster, **more):
        about = {"job": "data-corpus", "from": cluster}
        return inner.request(folder, 20.0, op, **about, **more)[0]

    def dial(at):
        request(at.folder, "dial", "generator:0", to="data", lab="").close()

    with socket.create_server(("127.0.0.1", 0)) as trainer:
        where = {"port": trainer.getsockname()[1], "shared": True}
        with request(bob, "serve", "data", **where):
            labs.s.switch.state.charged["bob"] = 1000
            limit(1000)
            with pytest.raises(inner.Refused, match="bob: its quota of 1000 bytes"):
                dial(labs.s)
            words = "the switch of lab-s: .* quota of its account is used up"
            with pytest.raises(inner.Absent, match=words) as found:
                dial(labs.t)
            assert "bob" not in str(found.value)
            limit(10**9)
            dial(labs.s)
            dial(labs.t)


def test_a_user_of_the_host_trains_under_an_account_as_long_as_that_lives(
    labs, monkeypatch, tmp_path
):
    """Its trainer comes by the socket; streams, log and status have its name."""
    people = labs.s.switch.state.people
    ana = host_users.folder_of(monkeypatch, labs.s, tmp_path / "ana", "ana")
    about = {"job": "of-ana", "from": "generator:0"}
    for op, more in (("status", {}), ("dial", {"to": "a"}), ("serve", {"port": 1})):
        with pytest.raises(errors.NebulaError, match="60001 of this host has"):
            inner.request(ana, 20.0, op, **about, **more, lab="")
    assert not labs.s.switch.state.served
    tiny_accounts.person(people, "ana")
    at = types.SimpleNamespace(folder=ana)
    exchange(labs.t, at, 3, job="of-ana")
    wait_until(lambda: not labs.s.switch.state.in_flight)
    log = two_labs.entries(labs.s.switch.state)
    assert {e.who for e in log if e.what.get("job") == "of-ana"} == {"ana@lab-s"}
    with pytest.raises(inner.Refused, match="the owner of the lab alone does this"):
        inner.request(ana, 20.0, "rotate")
    people.move("ana", "suspend")
    with pytest.raises(inner.Refused, match="ana may do nothing: it is suspended"):
        inner.request(ana, 20.0, "dial", job="of-ana", **{"from": "a", "to": "b"})
    people.move("ana", "resume")
    assert inner.user_of(socket.socketpair()[0]) == os.geteuid()  # the kernel's word


def test_certificates_renew_themselves_at_a_fifth_of_their_life(tmp_path, monkeypatch):
    monkeypatch.setattr(upkeep, "RETRY_SECONDS", 0.1)
    with two_labs.two_labs(tmp_path) as labs:
        # Its life begins a minute before it is issued: a fifth is over 2 s later.
        life = datetime.timedelta(seconds=250)
        monkeypatch.setattr(authority, "LEAF_LIFETIME", life)
        serials = []
        for each in (labs.s, labs.t):
            each.run(each.switch.upkeep.rotate())
            serials.append(member.load(each.folder, "switch").certificate.serial_number)
        for each, serial in zip((labs.s, labs.t), serials, strict=True):
            wait_until(
                lambda each=each, serial=serial: (
                    member.load(each.folder, "switch").certificate.serial_number
                    != serial
                )
            )
        exchange(labs.s, labs.t)


def test_a_line_ends_with_the_certificate_of_its_lab(tmp_path):
    with two_labs.two_labs(tmp_path) as labs:
        made, now = labs.s.switch.state.lines["lab-t"], site_folder.utc_now()
        assert abs(made.end - now - datetime.timedelta(days=5)).total_seconds() < 100
        made.end = now
        wait_until(lambda: any("has expired" in each for each in labs.s.lines))
        assert made.is_closed
