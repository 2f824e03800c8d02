"""The requests of trainers and of other switches: what is refused, and to whom."""

import asyncio
import json
import types

import pytest
import two_labs

from nebula_jax import errors
from nebula_jax.communication.wire import json_lines
from nebula_jax.federation import inner, line, requests, server, state, streams
from nebula_jax.security import accounts, policy

ABOUT = streams.About(
    "0" * 16, "m3", "ana@lab-s", "generator:0", "discriminator", "lab-s"
)
SECRET = f"nebula1.{'a' * 16}"  # as an invitation begins: the audit log refuses it


@pytest.mark.parametrize("job", ["m3", "M3.es_2-x", "nebula1.es", "x" * 64])
def test_a_job_may_have_a_name_that_the_audit_log_takes(job):
    assert requests.is_job(job)
    requests.check_about(ABOUT._replace(job=job))


@pytest.mark.parametrize("job", ["", "-m3", "a/b", "x" * 65, SECRET, f"x.{SECRET}.y"])
def test_a_job_that_the_audit_log_would_not_take_is_none(job):
    assert not requests.is_job(job)
    with pytest.raises(json_lines.Malformed):
        requests.check_about(ABOUT._replace(job=job))


def account(name):
    return accounts.Account(name, 60001, accounts.ACTIVE, accounts.Limits())


def rules(folder):
    """What policy.json says: of the job `named`, the discriminator is at lab-t."""
    text = {"jobs": {"named": {"labs": {"discriminator": ["lab-t"]}}}}
    path = folder.path / policy.FILE
    path.write_text(json.dumps(text))
    return policy.load(path)


@pytest.fixture(scope="module")
def switch(tmp_path_factory):
    """A switch with lines to lab-t and lab-u, and two trainers; nothing moves."""
    made = server.Switch(two_labs.found(tmp_path_factory.mktemp("lab")), print)
    found = made.state
    found.rules = rules(found.folder)
    found.lines = {"lab-t": None, "lab-u": None}
    ana = account("ana")
    for job, cluster, lab in (
        ("hers", "generator:0", "lab-t"),
        ("open", "discriminator", ""),
        ("for-u", "discriminator", "lab-u"),
    ):
        where = ("127.0.0.1", 1)  # nobody's
        found.served[job, cluster] = state.Served(where, ana, lab=lab)
    yield made
    found.audit.close()


DIAL = {"op": "dial", "job": "m3", "from": "generator:0", "to": "discriminator"}
SERVE = {"op": "serve", "job": "m3", "from": "discriminator", "port": 1, "lab": ""}
RECORD = {"op": "record", "kind": "job", "what": {"event": "begun"}}


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("bob", {"op": "rotate"}, "the owner of the lab alone does this"),
        ("bob", {"op": "join"}, "the owner of the lab alone does this"),
        ("bob", RECORD | {"kind": "grant"}, "'grant' is no entry of a trainer"),
        ("bob", DIAL | {"job": "hers", "lab": "lab-t"}, "is one of ana here"),
        ("bob", SERVE | {"job": "hers", "lab": "lab-t"}, "is one of ana here"),
        ("bob", DIAL | {"job": "a/b", "lab": "lab-t"}, "cannot be the name of"),
        ("bob", DIAL | {"lab": ""}, "any of lab-t, lab-u: give peer="),
        ("bob", SERVE, "any of lab-t, lab-u: give peer="),
        ("bob", DIAL | {"job": "named", "lab": "lab-u"}, "lab-u may not be"),
        ("spent", DIAL | {"lab": "lab-t"}, "its quota of 0 bytes"),
    ],
)
def test_a_request_that_an_account_may_not_make_is_refused(
    switch, monkeypatch, name, fields, words
):
    found = switch.state
    spent = account("spent")._replace(limits=accounts.Limits(quota_bytes=0))
    monkeypatch.setitem(found.accounts, "spent", spent)
    writer = types.SimpleNamespace(get_extra_info=lambda _: ("127.0.0.1", 2))
    served = requests.serve(found, None, account(name), fields, (None, writer))
    with pytest.raises(errors.NebulaError, match=words):
        asyncio.run(served)


def test_a_lab_that_was_revoked_ends_no_run_with_another_whose_line_broke(
    switch, monkeypatch
):
    found, writer = switch.state, types.SimpleNamespace(get_extra_info=lambda _: None)
    monkeypatch.setattr(found, "lines", {})
    monkeypatch.setattr(found, "gone", {"lab-t": "the certificate was revoked"})

    def dial(**fields):
        who, asker = account("bob"), (None, writer)
        asyncio.run(requests.serve(found, switch.upkeep, who, DIAL | fields, asker))

    monkeypatch.setattr(found, "members", {"lab-t", "lab-u"})
    for fields in ({"lab": "lab-u"}, {"job": "named", "lab": ""}):
        with pytest.raises(inner.Absent, match="at no lab at present"):
            dial(**fields)
    with pytest.raises(inner.Lost, match="was revoked"):
        dial(lab="lab-t")
    monkeypatch.setattr(found, "members", {"lab-t"})  # which alone there was
    with pytest.raises(inner.Lost, match="was revoked"):
        dial(lab="")


def test_who_finds_nobody_is_told_which_lines_there_are(switch, monkeypatch):
    """No switch relays: a trainer may be at a lab to which this one has no line."""

    async def absent(*_):
        raise inner.Absent("it is not here")

    monkeypatch.setattr(switch.state, "open", absent)
    writer = types.SimpleNamespace(get_extra_info=lambda _: ("127.0.0.1", 2))
    fields = DIAL | {"job": "named", "lab": ""}
    asked = requests.serve(switch.state, None, account("bob"), fields, (None, writer))
    words = "has lines to lab-t, lab-u alone, and none relays"
    with pytest.raises(inner.Absent, match=words):
        asyncio.run(asked)


def test_an_entry_is_on_the_disk_before_its_trainer_is_told(switch, monkeypatch):
    """A run goes on, and a command makes its change, once the entry is there."""
    done, log = [], switch.state.audit
    monkeypatch.setattr(log, "commit", lambda: done.append("on the disk"))
    writer = types.SimpleNamespace(write=lambda data: done.append("told"))
    asked = requests.serve(switch.state, None, account("bob"), RECORD, (None, writer))
    asyncio.run(asked)
    assert done == ["on the disk", "told"]


@pytest.mark.parametrize(
    ("about", "words"),
    [
        (ABOUT._replace(account="ana@lab-u"), "names cannot be right"),
        (ABOUT._replace(job="a/b"), "names cannot be right"),
        (ABOUT, "is not here"),
        (ABOUT._replace(job="for-u"), "is for lab-u alone"),
        (ABOUT._replace(job="open"), "any of lab-t, lab-u: give peer="),
        (
            ABOUT._replace(job="named", connector="discriminator"),
            "lab-s may not be discriminator",
        ),
    ],
)
def test_a_stream_of_another_lab_that_may_not_be_is_refused(switch, about, words):
    told, ends = [], []
    made = types.SimpleNamespace(lab="lab-s", send=lambda **what: told.append(what))
    stream = types.SimpleNamespace(number=1, close=lambda *why, at_once: ends.append(1))
    before = two_labs.entries(switch.state)
    asyncio.run(switch._answer(made, stream, about))
    ((answer),) = told
    assert answer["op"] == "refused"
    assert words in answer["why"]
    assert ends
    entries = two_labs.entries(switch.state)[len(before) :]
    found = [(each.kind, each.who) for each in entries]
    assert found == ([] if answer["absent"] else [("refusal", "lab-s")])


def test_a_lab_opens_so_many_streams_and_then_one_in_a_while(switch, monkeypatch):
    """What each has carried is in the audit log for ever."""
    monkeypatch.setattr(state, "ENTRIES_BURST", 2)
    monkeypatch.setattr(state, "ENTRIES_SECONDS", 1e6)
    monkeypatch.setattr(requests, "connect", refuse)
    told = []
    made = types.SimpleNamespace(lab="lab-x", send=lambda **what: told.append(what))
    stream = types.SimpleNamespace(number=1, close=lambda at_once: None)
    about = ABOUT._replace(job="hers", listener="generator:0", lab="lab-x")
    switch.state.served["hers", "generator:0"] = state.Served(
        ("127.0.0.1", 1), account("ana"), lab="lab-x"
    )
    about = about._replace(account="ana@lab-x")
    for _ in range(4):
        asyncio.run(switch._answer(made, stream, about))
    assert ["very many entries" in each["why"] for each in told] == [0, 0, 1, 1]
    assert all(each["absent"] for each in told)  # its trainer tries again


def test_trainers_of_a_lab_dial_each_other_so_often_and_then_once_in_a_while(
    switch, monkeypatch
):
    monkeypatch.setattr(state, "ENTRIES_BURST", 2)
    monkeypatch.setattr(state, "ENTRIES_SECONDS", 1e6)
    monkeypatch.setattr(requests, "connect", refuse)
    eve = account("eve")
    where = ("127.0.0.1", 1)  # nobody's
    served = state.Served(where, eve)
    monkeypatch.setitem(switch.state.served, ("eves", "discriminator"), served)

    def dial():
        fields, asker = DIAL | {"job": "eves", "lab": "lab-s"}, (None, None)
        asyncio.run(requests.serve(switch.state, None, eve, fields, asker))

    for _ in range(2):
        with pytest.raises(ConnectionRefusedError):
            dial()
    with pytest.raises(inner.Absent, match="eve@lab-s has made very many entries"):
        dial()


def test_a_trainer_makes_so_many_entries_and_then_one_in_a_while(switch, monkeypatch):
    monkeypatch.setattr(state, "ENTRIES_BURST", 20)
    monkeypatch.setattr(state, "ENTRIES_SECONDS", 1e6)
    monkeypatch.setattr(switch.state, "_allowances", {})
    writer = types.SimpleNamespace(write=lambda data: None)

    def record(name, **fields):
        who, fields = account(name), RECORD | fields
        asyncio.run(requests.serve(switch.state, None, who, fields, (None, writer)))

    record("eve", what={"event": "x" * 30 * state.ENTRY_BYTES})  # one for thirty
    before = len(two_labs.entries(switch.state))
    with pytest.raises(inner.Absent, match="eve@lab-s has made very many entries"):
        record("eve")
    for _ in range(20):
        record("mallory")
    with pytest.raises(inner.Absent, match="mallory@lab-s"):
        record("mallory")
    assert len(two_labs.entries(switch.state)) == before + 20


def test_who_waits_no_more_is_forgotten(switch, monkeypatch):
    """Else a trainer that asks for many jobs would fill the memory."""
    clock = types.SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(requests, "time", clock)
    monkeypatch.setattr(switch.state, "lines", {})
    monkeypatch.setattr(switch.state, "waiting", {})
    writer = types.SimpleNamespace(get_extra_info=lambda _: None)
    for number in range(100):
        clock.now += requests.WAITING_SECONDS / 10
        fields = DIAL | {"job": f"job-{number}", "lab": "lab-t"}
        asked = requests.serve(
            switch.state, switch.upkeep, account("eve"), fields, (None, writer)
        )
        with pytest.raises(inner.Absent):
            asyncio.run(asked)
    assert 0 < len(switch.state.waiting) < 20


def test_a_stream_too_many_is_refused_and_ends_no_line(switch):
    told = []

    def accept(number):
        raise line.Full("the line to lab-t has 128 streams at present")

    made = types.SimpleNamespace(
        lab="lab-t", accept=accept, send=lambda **what: told.append(what)
    )
    switch._announced(made, {"stream": 7, **ABOUT._asdict()})
    ((answer),) = told
    assert answer["absent"]  # its trainer tries again
    assert (answer["op"], answer["stream"]) == ("refused", 7)


async def refuse(served):
    raise ConnectionRefusedError
