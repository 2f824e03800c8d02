"""The audit log has what streams have carried, however they end."""

import asyncio
import contextlib
import json
import socket
import struct
import types

import pytest
import two_labs

from nebula_jax.communication.wire import frames
from nebula_jax.federation import inner, line, meter, state, streams
from nebula_jax.security import accounts, policy, seal
from nebula_jax.security.membership import site_folder
from nebula_jax.security.tls import between_labs

ABOUT = streams.About(
    "0" * 16, "m3", "owner@lab-s", "generator:0", "discriminator", "lab-t"
)
SECRET = f"nebula1.{'a' * 16}"  # as an invitation begins: the audit log refuses it
MAC = seal.Seal(bytes(32))


def frame(message, sequence):
    return b"".join(map(bytes, frames.encode(message, sequence, 0, MAC)))


OPEN = frame(frames.Open(bytes(16), 1), 0)
TENSOR = frame(frames.Tensor(0, 1, 0, [bytes(300)]), 1)


@pytest.fixture
def switch(tmp_path):
    made = state.State(two_labs.found(tmp_path), print)
    made.sessions[bytes(16).hex()] = [[], [["tokens", "pack_ids(4000)"]]]
    yield made
    made.audit.close()


def counted(switch):
    """Direction and kind -> frames, by the entries of the audit log."""
    return {
        (each.what["direction"], each.what["kind"]): each.what["frames"]
        for each in two_labs.entries(switch)
        if each.kind == "stream"
    }


@contextlib.asynccontextmanager
async def carrying(switch, about=ABOUT, account="owner", is_listener=False):
    """Yields the task of a stream, its trainer's socket, and its other end."""
    trainer, here = socket.socketpair()
    with trainer:
        near, far = line.local_pair()
        connection = await asyncio.open_connection(sock=here)
        carried = switch.carry(about, account, connection, near, is_listener)
        yield asyncio.create_task(carried), trainer, far


async def taken_by(far, count):
    """Waits until so many bytes have come to the other end."""
    while count > 0:
        count -= len(await asyncio.wait_for(far.receive(), 20))


def test_no_text_of_a_peer_keeps_a_stream_out_of_the_log(switch):
    """Names that are refused elsewhere, or were not by an earlier switch."""
    switch.sessions[bytes(16).hex()] = [[], [[SECRET, "fp16"]]]

    async def carry():
        async with carrying(switch, ABOUT._replace(job=SECRET)) as (task, trainer, _):
            trainer.sendall(OPEN + TENSOR)
            trainer.shutdown(socket.SHUT_WR)
            await asyncio.wait_for(task, 20)

    asyncio.run(carry())
    hidden = "(may be a secret)"
    assert counted(switch) == {("sent", "Open"): 1, ("sent", hidden): 1}


def test_what_leaves_must_be_encoded_as_the_policy_says(switch):
    """The session's Welcome tells the codecs: before a tensor has come, it is over."""
    rules = {"codecs": {"tokens": "private(1, 0.5)"}}
    switch.rules = policy.Policy({"m3": rules})
    welcome = [[], [{"name": "tokens", "codec": "private(1, 0.25)|int8(64)"}]]
    message = frames.Welcome(4, json.dumps(welcome).encode())

    async def carry(is_known):
        async with carrying(switch) as (task, trainer, far):
            if is_known:  # of a stream before, under another policy
                trainer.sendall(OPEN + TENSOR)
            else:
                switch.sessions.clear()
                trainer.sendall(OPEN)
                await taken_by(far, len(OPEN))
                await far.send(OPEN + frame(message, 0))
            await asyncio.wait_for(task, 20)

    switch.sessions[bytes(16).hex()] = [[], [["tokens", "int8(64)"]]]
    for is_known in (True, False):
        asyncio.run(carry(is_known))
        refusal = switch.refusals.pop(("m3", "generator:0"))
        assert "tokens may not leave for job m3 as" in refusal
        assert (
            "policy.json asks for a codec that begins with private(1, 0.5)" in refusal
        )
    assert ("sent", "tokens") not in counted(switch)


def test_a_policy_that_asks_for_another_codec_ends_streams_that_run(switch):
    async def carry():
        async with carrying(switch) as (task, trainer, far):
            trainer.sendall(OPEN + TENSOR)
            await taken_by(far, len(OPEN + TENSOR))
            rules = {"codecs": {"tokens": "private(1, 0.5)"}}
            switch.set_rules(policy.Policy({"m3": rules}))
            trainer.sendall(TENSOR)
            await asyncio.wait_for(task, 20)

    asyncio.run(carry())
    assert "tokens may not leave" in switch.refusals["m3", "generator:0"]
    assert counted(switch)["sent", "tokens"] == 1


def test_a_stream_that_ends_with_its_switch_is_counted_as_far_as_it_came(switch):
    """Its task is cancelled, perhaps again while its trainer takes what is left."""

    async def stop():
        async with carrying(switch) as (task, trainer, far):
            trainer.sendall(OPEN + TENSOR + TENSOR)
            await taken_by(far, len(OPEN + TENSOR + TENSOR))
            task.cancel()
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task], timeout=20)
            assert task.cancelled()

    asyncio.run(stop())
    assert counted(switch) == {("sent", "Open"): 1, ("sent", "tokens"): 2}
    assert not switch.in_flight


def test_jobs_that_an_account_makes_up_are_forgotten_and_those_with_bounds_are_not(
    switch, monkeypatch
):
    """Also why their streams were ended. Nor is one with a stream that still runs."""
    switch.rules = policy.Policy({"m3": {"bytes": 1e9}, "*": {"kinds": []}})
    many = 20
    monkeypatch.setattr(state, "MOST_JOBS", many)

    async def carry(job):
        async with carrying(switch, ABOUT._replace(job=job)) as (task, trainer, _):
            trainer.sendall(OPEN + (b"" if job == "m3" else TENSOR))
            trainer.shutdown(socket.SHUT_WR)
            await asyncio.wait_for(task, 20)

    async def carry_many():
        async with carrying(switch, ABOUT._replace(job="runs")) as (task, trainer, far):
            trainer.sendall(OPEN)
            await taken_by(far, len(OPEN))
            for number in range(many + 10):
                await carry(f"job-{number}")
            trainer.shutdown(socket.SHUT_WR)
            await asyncio.wait_for(task, 20)

    asyncio.run(carry("m3"))
    asyncio.run(carry_many())
    assert len(switch.used) == len(switch.refusals) == many
    assert switch.used["m3"] == switch.used["runs"] == len(OPEN)
    assert f"job-{many + 9}" in switch.used
    assert "job-0" not in switch.used


def test_two_streams_of_one_name_are_both_in_the_log(switch):
    """Another switch chooses the names of those that it opens."""

    async def carry():
        async with carrying(switch) as one, carrying(switch) as other:
            await asyncio.sleep(0)
            assert len(switch.in_flight) == 2
            for count, (task, trainer, _) in enumerate((one, other), 1):
                trainer.sendall(OPEN + count * TENSOR)
                trainer.shutdown(socket.SHUT_WR)
                await asyncio.wait_for(task, 20)

    asyncio.run(carry())
    entries = two_labs.entries(switch)
    streams_of = [each.what for each in entries if each.kind == "stream"]
    tensors = [each["frames"] for each in streams_of if each["kind"] == "tokens"]
    assert tensors == [1, 2]
    assert not switch.in_flight


def bar(switch, name):
    """Suspends an account, as upkeep finds it."""
    limits = accounts.Limits()
    switch.accounts[name] = accounts.Account(name, 1, accounts.SUSPENDED, limits)


def test_a_quota_is_used_up_within_a_frame(switch):
    """Whatever its head claims: all that comes counts at once."""
    owner, taken = switch.accounts["owner"], len(OPEN + TENSOR) - 300
    limits = accounts.Limits(quota_bytes=taken + 100)
    switch.accounts["owner"] = owner._replace(limits=limits)

    async def carry():
        async with carrying(switch) as (task, trainer, far):
            trainer.sendall(OPEN + TENSOR[:-200])
            await taken_by(far, taken + 100)
            trainer.sendall(TENSOR[-200:])
            await asyncio.wait_for(task, 20)

    asyncio.run(carry())
    assert switch.charged["owner"] == taken + 100
    assert "its quota of" in switch.why_barred("owner")


def test_an_account_is_charged_for_what_has_come_of_a_frame(switch):
    """A head may claim a terabyte, and the stream end after it."""
    head = bytearray(TENSOR[: -len(bytes(300))])
    struct.pack_into("!Q", head, 24, meter.MOST_PAYLOAD)

    async def carry():
        async with carrying(switch) as (task, trainer, _):
            trainer.sendall(OPEN + head)
            trainer.shutdown(socket.SHUT_WR)
            await asyncio.wait_for(task, 20)

    asyncio.run(carry())
    assert switch.charged["owner"] == len(OPEN + head)
    assert switch.used["m3"] == len(OPEN + head)
    entries = two_labs.entries(switch)
    kinds = {each.what["kind"]: each.what for each in entries if each.kind == "stream"}
    assert kinds["tokens"]["bytes"] == len(head)


@pytest.mark.parametrize("is_listener", [False, True])
def test_an_account_that_is_barred_within_a_frame_sends_no_more_of_it(
    switch, is_listener
):
    """Also that of a trainer that listens to others of its lab, who pay."""
    about = ABOUT._replace(lab="lab-s")
    sent = bytearray(OPEN + TENSOR[: -len(bytes(300))])

    async def carry():
        half = carrying(switch, about, is_listener=is_listener)
        async with half as (task, trainer, far):
            if is_listener:
                await far.send(sent)
                await asyncio.get_running_loop().run_in_executor(
                    None, trainer.recv, len(sent), socket.MSG_WAITALL
                )
            else:
                trainer.sendall(sent)
                await taken_by(far, len(sent))
            bar(switch, "owner")
            if is_listener:
                await far.send(bytes(100))
            else:
                trainer.sendall(bytes(100))
            await asyncio.wait_for(task, 20)

    asyncio.run(carry())
    entries = two_labs.entries(switch)
    reasons = [each.what["reason"] for each in entries if each.kind == "refusal"]
    assert reasons == ["QuotaSpent"]


def test_a_stream_that_a_quota_ends_is_a_refusal_of_the_account_it_is_of(switch):
    """Not of ana, who dialed, and whose quota is not spent."""
    about = ABOUT._replace(account="ana@lab-s", lab="lab-s")
    bar(switch, "bob")

    async def carry():
        half = carrying(switch, about, "bob", is_listener=True)
        async with half as (task, _, far):
            await far.send(OPEN)
            await asyncio.wait_for(task, 20)
            with pytest.raises(line.LineEnded) as told:  # who may be of another lab
                await far.send(OPEN)
        assert not str(told.value)

    asyncio.run(carry())
    entries = two_labs.entries(switch)
    refused = [(each.who, each.what) for each in entries if each.kind == "refusal"]
    assert refused == [("bob@lab-s", {"reason": "QuotaSpent", "job": "m3"})]


def test_a_stream_between_two_trainers_of_a_lab_counts_once(switch):
    """Both of its halves see each frame."""
    about, data = ABOUT._replace(lab="lab-s"), OPEN + 4 * TENSOR
    switch.set_rules(policy.Policy({"m3": {"bytes": len(data), "kinds": ["tokens"]}}))

    async def carry():
        pairs = [socket.socketpair() for _ in range(2)]
        (connector, _), (listener, _) = pairs
        with connector, listener:
            ours, theirs = [
                await asyncio.open_connection(sock=here) for _, here in pairs
            ]
            near, far = line.local_pair()
            one, other = (
                asyncio.create_task(switch.carry(about, *half))
                for half in (
                    ("ana", ours, near, False),
                    ("owner", theirs, far, True),
                )
            )
            connector.sendall(data)
            listener.setblocking(False)
            loop, taken = asyncio.get_running_loop(), b""
            while len(taken) < len(data):
                received = await asyncio.wait_for(loop.sock_recv(listener, 9999), 20)
                assert received, switch.refusals
                taken += received
            connector.shutdown(socket.SHUT_WR)
            await asyncio.wait_for(asyncio.gather(one, other), 20)

    asyncio.run(carry())
    assert switch.used == {"m3": len(data)}
    assert switch.charged == {"ana": len(data)}
    both = {("sent", "tokens"): 4, ("received", "tokens"): 4}
    assert both.items() <= counted(switch).items()


def test_a_refusal_of_a_stream_that_ends_with_its_switch_is_recorded(switch):
    """The trainer does not take the end of it, so that it is still under way."""
    switch.set_rules(policy.Policy({"m3": {"kinds": ["held_out"]}}))

    async def stop():
        async with carrying(switch) as (task, trainer, far):
            trainer.sendall(OPEN + TENSOR)
            while not far.has_ended:
                await asyncio.wait_for(far.receive(), 20)
            task.cancel()
            await asyncio.wait([task], timeout=20)

    asyncio.run(stop())
    assert counted(switch) == {("sent", "Open"): 1}
    refused = [each.kind for each in two_labs.entries(switch)]
    assert refused.count("refusal") == 1


async def begun_line():
    """A line that nothing moves."""
    reader, writer = await asyncio.open_connection(sock=socket.socketpair()[0])
    peer = between_labs.Peer("lab-t", "switch", 1, None, None)
    connection = line.Connection(reader, writer, peer)
    return line.Line(connection, is_dialer=True, beat=dict, receive=print)


def test_streams_wait_for_the_answer_of_their_own_line(switch):
    """A lab's next line is there before the last one ends, and counts from one too."""

    async def opened():
        former, latter = await begun_line(), await begun_line()
        waiting = []
        for each in (former, latter):
            switch.lines["lab-t"] = each
            waiting.append(asyncio.create_task(switch.open("lab-t", ABOUT, 1.0)))
            await asyncio.sleep(0)
        former.close("the line broke")
        with pytest.raises(inner.Absent, match="the line broke"):
            await waiting[0]
        assert not waiting[1].done()
        latter.streams[1].answer()
        assert await waiting[1] is latter.streams[1]
        refused = asyncio.create_task(switch.open("lab-t", ABOUT, 1.0))
        await asyncio.sleep(0)
        latter.streams[3].answer(inner.Refused("not this one"))
        with pytest.raises(inner.Refused, match="not this one"):
            await refused
        assert list(latter.streams) == [1]
        latter.close("the test is over")

    asyncio.run(opened())


def test_each_kind_that_a_stream_has_carried_counts_as_an_entry(switch, monkeypatch):
    """A stream may have thousands, for a hundred bytes each."""
    monkeypatch.setattr(state, "ENTRIES_BURST", 4)
    monkeypatch.setattr(state, "ENTRIES_SECONDS", 1e6)

    async def carry():
        async with carrying(switch) as (task, trainer, _):
            trainer.sendall(OPEN + TENSOR)
            trainer.shutdown(socket.SHUT_WR)
            await asyncio.wait_for(task, 20)

    async def opened():
        made = switch.lines["lab-t"] = await begun_line()
        waiting = asyncio.create_task(switch.open("lab-t", ABOUT, 1.0))
        await asyncio.sleep(0)
        stream = made.streams[1]
        stream.answer()
        try:
            await waiting
        finally:
            assert stream.is_held == (waiting.exception() is None)
            made.close("the test is over")

    switch.take_entries(ABOUT.account)
    asyncio.run(carry())
    asyncio.run(opened())
    with pytest.raises(inner.Absent, match="owner@lab-s has made very many entries"):
        asyncio.run(opened())


def test_a_stream_that_the_other_side_ends_unanswered_takes_no_place(switch):
    async def opened():
        made = switch.lines["lab-t"] = await begun_line()
        waiting = asyncio.create_task(switch.open("lab-t", ABOUT, 1.0))
        await asyncio.sleep(0)
        stream = made.streams.pop(1)
        stream._end()
        with pytest.raises(inner.Absent):
            await waiting
        assert not stream.is_held
        made.close("the test is over")

    asyncio.run(opened())


def test_a_lab_makes_a_bounded_number_of_entries_by_renewing(switch, monkeypatch):
    logged = []

    async def issuer(fields):
        return {"lab": "lab-t", "issued": {"switch": "a"}, "pem": "b"}

    def entry(log, lab, role, pem):
        logged.append(lab)
        return {}

    monkeypatch.setattr(state, "ISSUED_BURST", 3)
    monkeypatch.setattr(state.joining, "logged", entry)
    switch._issuer = issuer

    async def ask():
        for _ in range(3):
            assert await switch.ask({}) == {
                "lab": "lab-t",
                "issued": {"switch": "b"},
                "pem": "b",
            }
        with pytest.raises(site_folder.FederationError, match="very many certificates"):
            await switch.ask({})

    asyncio.run(ask())
    assert logged == ["lab-t"] * 3


def test_who_joins_knows_the_authoritys_lab_before_it_has_met_it(tmp_path):
    """Whoever answers at that lab's address may be a third one, which gets nothing."""
    first = two_labs.found(tmp_path / "s")
    s = two_labs.Running(first, listens=True)
    try:
        folder = two_labs.join(tmp_path / "t", first, s.address)
    finally:
        s.stop()
    made = state.State(folder, print)
    made.check_named("m3")
    made.lines["lab-u"] = None
    with pytest.raises(inner.Refused, match="any of lab-s, lab-u: give peer=NAME"):
        made.check_named("m3")
    made.audit.close()


NOTED = ("lab-t", "refused a connection", "refusal", "lab-t")


@pytest.fixture
def clock(monkeypatch):
    made = types.SimpleNamespace(now=100.0, time=lambda: 0.0)
    made.monotonic = lambda: made.now
    monkeypatch.setattr(state, "time", made)
    return made


def noted(switch):
    """For how many each entry about a refusal stands."""
    log = two_labs.entries(switch)
    return [1 + each.what.get("others", 0) for each in log if each.kind == "refusal"]


def test_a_few_of_one_cause_have_an_entry_each_and_many_have_one_a_minute(
    switch, clock
):
    """A peer, or strangers together, can cause very many, and nothing is pruned."""
    for _ in range(state.NOTED_BURST):
        switch.note(*NOTED)
    assert noted(switch) == [1] * state.NOTED_BURST
    for _ in range(5000):
        clock.now += 0.06
        switch.note(*NOTED)
    later = noted(switch)[state.NOTED_BURST :]
    assert 4 <= len(later) <= 6
    assert sum(later) >= 4000
    switch.note("another", *NOTED[1:])  # no cause keeps others out of the log
    assert noted(switch)[-1] == 1
    clock.now += 1000.0
    before = len(noted(switch))
    switch.note(*NOTED)
    switch.note(*NOTED)
    assert len(noted(switch)) == before + 2
