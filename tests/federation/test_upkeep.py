"""What has crossed is on the disk soon; peers cosign one head after another."""

import asyncio
import collections
import threading
import types
from unittest import mock

import audit_logs
import pytest
import tiny_accounts
import two_labs

from nebula_jax import errors
from nebula_jax.communication.wire import json_lines
from nebula_jax.federation import cosigning, state, upkeep
from nebula_jax.security import accounts, audit
from nebula_jax.security import store as store_lib
from nebula_jax.security.audit import signed_heads, witness
from nebula_jax.security.membership import authority, checkup, member, site_folder


@pytest.fixture
def folder(tmp_path):
    made = two_labs.found(tmp_path)
    tiny_accounts.person(tiny_accounts.reopen(tmp_path), "ana")
    return made


@pytest.fixture
def kept(folder):
    made = upkeep.Upkeep(state.State(folder, print))
    yield made
    asyncio.run(made.close())


def limit(kept, quota):
    kept.state.people.set_limits("ana", accounts.Limits(quota_bytes=quota))


def count(kept, job, account, nbytes):
    """Lets bytes pass."""
    kept.state.check_quota(account)
    kept.state.used[job] += nbytes
    kept.state.charged[account] += nbytes


def charged(kept):
    """What the disk has of ana, after a turn of upkeep."""
    asyncio.run(kept.save_counts())
    return on_disk(kept, "charged")["ana"]


def on_disk(kept, part):
    return kept.state._carried.read()[part]


def barred(kept, words):
    with pytest.raises(state.QuotaSpent, match=words):
        kept.state.check_quota("ana")


def test_limits_and_states_of_accounts_are_in_force_after_a_turn(kept):
    here = kept.state.people
    count(kept, "m3", "ana", 2000)
    limit(kept, 1000)
    assert charged(kept) == 2000
    barred(kept, "its quota of 1000 bytes")
    limit(kept, 3000)
    assert charged(kept) == 2000
    count(kept, "m3", "ana", 500)
    here.move("ana", "suspend")
    assert charged(kept) == 2500
    barred(kept, "it is suspended")
    here.move("ana", "resume")
    assert charged(kept) == 2500
    kept.state.check_quota("ana")


def test_what_a_full_disk_did_not_take_it_takes_later(kept, monkeypatch):
    full = mock.Mock(side_effect=store_lib.StoreError("the disk is full"))
    with monkeypatch.context() as patched:
        patched.setattr(kept.state, "keep", full)
        count(kept, "m3", "ana", 2000)
        with pytest.raises(store_lib.StoreError, match="the disk is full"):
            charged(kept)
    assert charged(kept) == 2000


class Guarded(collections.Counter):
    """Counts that no other thread than that of the event loop may use."""

    thread = None  # of a copy: any

    def _checked(name):
        def method(self, *values):
            assert self.thread in (None, threading.get_ident()), name
            return getattr(super(), name)(*values)

        return method

    __getitem__, __setitem__ = _checked("__getitem__"), _checked("__setitem__")
    __iter__, items, keys = _checked("__iter__"), _checked("items"), _checked("keys")
    __eq__, __ne__, copy = _checked("__eq__"), _checked("__ne__"), _checked("copy")


def guarded():
    made = Guarded()
    made.thread = threading.get_ident()
    return made


def test_the_thread_of_the_disk_uses_nothing_that_streams_change(kept):
    used = kept.state
    used.used, used.charged, used.sessions = guarded(), guarded(), guarded()
    count(kept, "m3", "ana", 2000)
    used.sessions["session"] = [[["tokens", "fp16"]], []]
    asyncio.run(kept._save())
    assert on_disk(kept, "charged") == {"ana": 2000}
    assert on_disk(kept, "used") == {"m3": 2000}
    assert on_disk(kept, "sessions") == {"session": [[["tokens", "fp16"]], []]}


def test_what_crosses_while_the_disk_is_written_is_written_next(kept, monkeypatch):
    keep = kept.state.keep

    async def save():
        loop = asyncio.get_running_loop()

        async def cross():
            count(kept, "another", "ana", 5)

        def slow(*values):
            asyncio.run_coroutine_threadsafe(cross(), loop).result(20)
            return keep(*values)

        monkeypatch.setattr(kept.state, "keep", slow)
        count(kept, "m3", "ana", 2000)
        await kept._save()

    asyncio.run(save())
    assert on_disk(kept, "charged") == {"ana": 2000}
    monkeypatch.setattr(kept.state, "keep", keep)
    assert charged(kept) == 2005
    assert on_disk(kept, "used") == {"m3": 2000, "another": 5}


def test_a_switch_that_ends_waits_for_what_the_disk_is_writing(kept, monkeypatch):
    """Two threads would write one file, and the older counts perhaps last."""
    write, may_write = kept.state.keep, threading.Event()

    async def stop():
        loop, is_writing = asyncio.get_running_loop(), asyncio.Event()

        def slow(*values):
            loop.call_soon_threadsafe(is_writing.set)
            assert may_write.wait(20)
            write(*values)

        monkeypatch.setattr(kept.state, "keep", slow)
        count(kept, "m3", "ana", 2000)
        task = asyncio.create_task(kept._save())
        await asyncio.wait_for(is_writing.wait(), 20)
        task.cancel()
        await asyncio.wait([task], timeout=0.05)
        is_done = task.done()
        may_write.set()
        await asyncio.wait([task], timeout=20)
        assert task.cancelled()
        assert not is_done

    asyncio.run(stop())
    assert kept.state._carried.read()["used"] == {"m3": 2000}


def test_a_revoked_lab_is_gone_though_the_audit_log_takes_no_entry(kept, monkeypatch):
    """As after an error of its disk, until somebody mends that."""
    closed, begin = [], site_folder.utc_now() - member.BACKDATED
    kept.state.lines["lab-t"] = types.SimpleNamespace(
        lab="lab-t", begin=begin, close=closed.append, send=lambda **fields: None
    )
    issuer = authority.LocalAuthority(kept.state.folder)
    issuer.admit("lab-t")
    issuer.revoke("lab-t")
    kept._read_list()
    with monkeypatch.context() as patched:
        patched.setattr(kept.state.audit, "_refusal", "the disk failed")
        with pytest.raises(audit.AuditError, match="the disk failed"):
            kept._enforce()
    assert closed == ["the certificate of lab-t was revoked"]


def test_it_is_said_in_time_that_the_key_that_issues_ends(kept, monkeypatch, capsys):
    asyncio.run(kept._renew_if_due())
    assert "rekey" not in capsys.readouterr().out
    monkeypatch.setattr(checkup, "ISSUER_NOTICE", authority.ISSUER_LIFETIME)
    for _ in range(2):
        kept._next_look = 0.0
        asyncio.run(kept._renew_if_due())
    assert capsys.readouterr().out.count("nebula rekey root.pem") == 1


def test_an_answer_of_the_authority_that_is_none_ends_no_switch(kept):
    """Another lab's switch passes it on: `run` takes it for a fault of that."""
    kept.state._issuer = mock.AsyncMock(return_value={"time": 1.0})
    with pytest.raises(json_lines.Malformed, match="revocations is no str"):
        asyncio.run(kept.fetch_list())
    with pytest.raises(json_lines.Malformed, match="issued is no dict"):
        asyncio.run(kept.rotate())


def take(kept, line, op, fields):
    """Takes a message of a peer, and all that it leads to."""

    async def taken():
        kept.receive(line, op, fields)
        await asyncio.gather(*kept.state._tasks)
        await kept.cosigning.turn()

    asyncio.run(taken())


def saved(kept):
    """Has an entry, and the peers cosign the head that there is."""
    kept.state.record("checkpoint", "ana", event="saved", step=1)
    kept.cosigning.send()
    asyncio.run(kept.cosigning.turn())


class Peer:
    """The line to lab-t, which cosigns what came, one after another, when it is due."""

    def __init__(self, kept, folder):
        self.kept, self.lab, self.sent = kept, "lab-t", []
        self.witness, self.log = (
            witness.Witness(folder),
            audit_logs.opened(folder, self.lab),
        )
        self.line = types.SimpleNamespace(
            lab=self.lab, send=self._send, begin=site_folder.utc_now()
        )
        kept.state.lines[self.lab] = self.line

    def _send(self, op, **fields):
        if op == "cosign":
            self.sent.append(fields)

    def begin(self):
        asyncio.run(self.kept.met(self.line))
        size = self.witness.size("lab-s")
        take(self.kept, self.line, "witnessed", {"size": size})

    def cosigned(self, fields):
        """The answer to a head."""
        proof = [bytes.fromhex(each) for each in fields["proof"]]
        text = fields["head"]
        head = self.witness.keep("lab-s", text, proof, fields["verifier"])
        return {"head": text, "cosignature": self.log.cosign(head).text}

    def answer(self):
        """Answers for the oldest head; returns the answer."""
        answer = self.cosigned(self.sent.pop(0))
        take(self.kept, self.line, "cosigned", answer)
        return answer

    def asks(self, verifier):
        """Asks to cosign the head of this lab's own log, by a key."""
        text = self.kept.state.audit.sign_head().text
        fields = {"head": text, "proof": [], "verifier": verifier}
        take(self.kept, self.line, "cosign", fields)

    def has_cosigned_all(self):
        """Asserts that the log has its cosignature of all that it has witnessed."""
        assert newest(self.kept)[0].size == self.witness.size("lab-s")


@pytest.fixture
def peer(kept, tmp_path):
    return Peer(kept, tmp_path / "t")


def newest(kept):
    """The newest head of the lab that its peer has cosigned."""
    return signed_heads.cosigned_in(kept.state.folder.audit)["lab-t"]


def test_an_answer_that_is_repeated_changes_nothing(kept, peer):
    """A peer could else make a log of its choice too long to be read again."""
    peer.begin()
    answer = peer.answer()
    before = newest(kept), len(two_labs.entries(kept.state))
    take(kept, peer.line, "cosigned", answer)
    assert (newest(kept), len(two_labs.entries(kept.state))) == before


def test_a_peer_gets_the_next_head_once_it_has_answered(kept, peer):
    """Its proof would else begin before what the peer has seen meanwhile."""
    peer.begin()
    for _ in range(3):
        saved(kept)
    assert len(peer.sent) == 1
    peer.answer()
    assert len(peer.sent) == 1
    peer.answer()
    assert not peer.sent
    peer.has_cosigned_all()


def test_a_refusal_is_recorded_whatever_a_peer_has_sent(kept, peer):
    """The reason has a text of the peer in it, and the log takes no secret."""
    for verifier in ("junk", f"nebula1.{'a' * 16}"):
        peer.asks(verifier)
    found = two_labs.entries(kept.state)
    why = [each.what["why"] for each in found if each.kind == "audit"]
    assert ["junk is no public key" in each for each in why] == [True, False]
    assert why[1] == "(may be a secret)"


def test_what_a_peer_gets_wrong_is_a_few_entries(kept, peer):
    """It could else make this log grow for ever, which can never be cut."""
    before = len(two_labs.entries(kept.state))
    for _ in range(300):
        peer.asks("junk")
    assert len(two_labs.entries(kept.state)) - before < 40


def test_a_peer_that_has_lost_what_it_witnessed_is_recorded(kept, peer):
    """As one that was restored from a backup; it is asked to witness all anew."""
    kept.state.record("checkpoint", "ana", event="saved", step=1)
    peer.begin()
    peer.answer()
    before = len(two_labs.entries(kept.state))
    take(kept, peer.line, "witnessed", {"size": 0})  # it is said once on a line
    assert len(two_labs.entries(kept.state)) == before
    asyncio.run(kept.met(peer.line))
    take(kept, peer.line, "witnessed", {"size": 0})
    log = two_labs.entries(kept.state)
    assert "went back" in [each.what.get("event") for each in log]
    assert peer.sent[-1]["proof"] == []


@pytest.mark.parametrize(
    ("op", "fields"),
    [
        ("witnessed", {"size": -1}),
        ("seen", {"of": "NO LAB!"}),
        ("cosign", {"head": "", "verifier": "", "proof": 5}),
        ("saw", {"of": "lab-u", "head": "junk"}),
    ],
)
def test_a_message_that_is_none_ends_the_line(kept, peer, op, fields):
    closed = []
    peer.line.close = closed.append
    try:
        take(kept, peer.line, op, fields)
    except errors.NebulaError as error:  # which ends it in `line`
        closed.append(error)
    assert len(closed) == 1


def test_who_asks_for_witnesses_ends_no_line_and_leaves_nothing(
    kept, peer, monkeypatch
):
    """Each account of the host may ask, for any name, at any time."""
    monkeypatch.setattr(cosigning, "ASK_SECONDS", 0.01)
    sent = []
    peer.line.send = lambda op, **fields: sent.append((op, fields))
    with pytest.raises(site_folder.FederationError, match="no lab's name"):
        asyncio.run(kept.cosigning.ask("NO LAB!"))

    async def twice():
        await asyncio.gather(*(kept.cosigning.ask("lab-u") for _ in range(2)))

    asyncio.run(twice())
    assert sent == [("seen", {"of": "lab-u"})]
    assert not kept.cosigning._asked


def test_what_cannot_be_read_of_a_log_is_not_told_and_ends_no_line(kept, peer):
    kept.cosigning._witness._path("lab-u").write_text("damaged")
    peer.line.close = pytest.fail
    take(kept, peer.line, "seen", {"of": "lab-u"})
    assert two_labs.entries(kept.state)[-1].what["event"] == "not told"


def test_no_message_of_a_peer_is_taken_while_one_of_its_kind_is(kept, peer):
    """Each takes a thread, and a peer could send very many."""
    taken = []

    async def slow(fields):
        taken.append(fields)
        await asyncio.sleep(0)

    async def send():
        for number in range(100):
            kept._begin(peer.line, "cosign", slow, number)
        await asyncio.gather(*kept.state._tasks)
        kept._begin(peer.line, "cosign", slow, 100)
        await asyncio.gather(*kept.state._tasks)

    asyncio.run(send())
    assert taken == [0, 100]


@pytest.mark.parametrize("is_late", [False, True])
def test_a_head_without_an_answer_is_sent_again(kept, peer, monkeypatch, is_late):
    """A peer with a full disk sends none, one on a slow line a late one."""
    now = [0.0]
    clock = types.SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(cosigning, "time", clock)
    peer.begin()
    saved(kept)  # the end of a run: nobody calls this again
    for seconds, count in ((1, 1), (20, 2), (39, 2), (41, 3), (60, 3)):
        now[0] = seconds
        asyncio.run(kept.cosigning.turn())
        assert len(peer.sent) == count
    assert all(each == peer.sent[0] for each in peer.sent)
    del peer.sent[2:]
    if not is_late:
        del peer.sent[0]
    while peer.sent:
        peer.answer()
    peer.has_cosigned_all()


def test_a_new_line_begins_with_what_the_peer_has_seen(kept, peer):
    peer.begin()
    peer.cosigned(peer.sent.pop())  # the answer was lost with the line
    asyncio.run(kept.met(peer.line))
    saved(kept)
    assert not peer.sent
    peer.begin()
    peer.answer()
    assert kept.state.audit.cosigned("lab-t") == peer.witness.size("lab-s")
