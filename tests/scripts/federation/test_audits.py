"""The commands about the audit log: what it shows, and what was done to it."""

import datetime
import shutil

import audit_logs
import nebula_command
import pytest

from nebula_jax.security import audit
from nebula_jax.security.audit import log as audit_log
from nebula_jax.security.audit import verify as audit_verify
from nebula_jax.security.audit import witness
from scripts.federation import audits


def other_log(path, *counts):
    """The audit log of lab-t; it has counted bytes that lab-s has sent it."""
    with audit_log.Log(path, "lab-t") as log:
        for count in counts:
            count_stream(log, "received", "lab-s", count)
        log.sign_head()
    return path


def count_stream(log, direction, peer, count, frames=1):
    what = {"direction": direction, "peer": peer, "bytes": count, "frames": frames}
    log.append("stream", "ana", job="m3", stream="ab", kind="tokens", **what)


def witnessed(lab, path):
    """Has lab-s witness the log of lab-t as it is."""
    seen = witness.Witness(lab.folder.audit)
    with audit_log.Log(path, "lab-t") as log:
        head, leaves = log.head_after(seen.size("lab-t"))
        seen.keep("lab-t", head.text, leaves, log.verifier.text)


def alter(folder, old, new):
    path = folder / "log.jsonl"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_the_log_shows_who_did_what(lab):
    lab("account", "add", "ana")
    lab("account", "suspend", "ana")
    lines = lab("audit", "show").out.splitlines()
    assert len(lines) == 5
    assert "lab-s: certificate issued (lab lab-s, role switch, serial " in lines[0]
    assert "federation founded (fingerprint " in lines[2]
    words = "account suspend (after suspended, before active, name ana)"
    assert lines[4].endswith(words)


def test_a_log_as_it_was_signed_and_witnessed_is_in_order(lab, monkeypatch):
    lab("account", "add", "ana")
    _, entries, wrong = lab("audit", "verify", status=1).out.splitlines()
    assert entries.endswith("4 entries of lab-s, as they were signed")
    assert wrong.startswith("wrong: fewer than 1 (--witnesses) have witnessed")
    assert "wrong" not in lab("audit", "verify", "--witnesses", 0).out
    peer = audit_logs.Peer(lab.path.parent / "t")
    with audit_log.Log(lab.folder.audit, "lab-s") as log:
        peer.exchange(log)
    # The file names the key, which this lab has not seen as lab-t's.
    assert "wrong: fewer than 1" in lab("audit", "verify", status=1).out
    own = peer.log.sign_head().text, [], peer.log.verifier.text
    witness.Witness(lab.folder.audit).keep("lab-t", *own)
    lab("account", "suspend", "ana")  # which nobody has to have witnessed yet
    found = lab("audit", "verify").out
    assert "witnessed by lab-t up to entry 3\n" in found
    lab("audit", "verify", "--witnesses", 2, status=1)
    copy = ("audit", "verify", "--folder", lab.path)  # it names its witnesses' keys
    assert "wrong: fewer than 1" in lab(*copy, status=1).out
    monkeypatch.setattr(audits, "UNWITNESSED", datetime.timedelta(0))
    assert "wrong: fewer than 1" in lab("audit", "verify", status=1).out


def test_an_entry_of_the_future_does_not_hide_what_follows(lab):
    later = datetime.datetime(9999, 1, 1, tzinfo=datetime.UTC)
    peer = audit_logs.Peer(lab.path.parent / "t")
    with audit_log.Log(lab.folder.audit, "lab-s", lambda: later) as log:
        peer.exchange(log)
        own = peer.log.sign_head().text, [], peer.log.verifier.text
        witness.Witness(lab.folder.audit).keep("lab-t", *own)
        log.append("job", "ana")
        log.sign_head()
    assert "wrong: fewer than 1" in lab("audit", "verify", status=1).out


def test_every_change_is_covered_by_a_signature(lab):
    lab("account", "add", "ana")
    newest = audit.paths(lab.folder.audit).head.read_text()
    assert newest.split()[1] == str(audit_logs.size(lab.folder.audit)) == "4"


def test_an_altered_entry_is_named(lab):
    lab("account", "add", "ana")
    alter(lab.folder.audit, '"name":"ana"', '"name":"eva"')
    found = lab("audit", "verify", status=1)
    _, wrong = found.out.splitlines()
    words = "wrong: log.jsonl: entries 0 to 3 (lines 1 to 4) are not as the newest head"
    assert wrong.startswith(words)
    assert "account add (name eva, " in lab("audit", "show").out  # it can still be read


def test_a_copy_is_verified_without_any_lab(lab, tmp_path):
    shutil.copytree(lab.path, tmp_path / "copy", symlinks=True)
    for folder in ("copy", "copy/audit"):
        found = nebula_command.run(
            "audit",
            "verify",
            "--witnesses=0",
            "--folder",
            tmp_path / folder,
            "--federation",
            tmp_path / "none",
        )
        assert found.status == 0
        assert "3 entries of lab-s, as they were" in found.out
        assert "held against itself alone" in found.out
    assert lab("audit", "show", "--folder", tmp_path / "copy").out.count("\n") == 3
    assert "there is no audit log" in lab.fails("audit", "verify", "--folder", tmp_path)


def test_a_copy_that_was_rolled_back_differs_from_what_was_witnessed(lab, tmp_path):
    """Its own signatures hold: only who has seen more of it finds that out."""
    log = other_log(tmp_path / "t", 100)
    shutil.copytree(log, tmp_path / "old")
    other_log(log, 200)
    witnessed(lab, log)
    verify = ("audit", "verify", "--folder")
    assert "held against 2 entries of lab-t" in lab(*verify, log).out
    alone = ("--witnesses=0", "--federation", tmp_path / "none")
    assert nebula_command.run(*verify, tmp_path / "old", *alone).status == 0
    found = lab(*verify, tmp_path / "old", status=1)
    assert "\nwrong: log.jsonl: entry 1 (line 2) is missing: " in found.out
    assert "it was rolled back" in found.out


def test_a_log_that_was_written_anew_has_another_key(lab, tmp_path):
    witnessed(lab, other_log(tmp_path / "t", 100))
    anew = other_log(tmp_path / "anew", 999)
    found = lab("audit", "verify", "--folder", anew, status=1)
    assert "not the public key of this log" in found.out


@pytest.mark.parametrize("more", [1, 2])
def test_two_views_of_a_log_are_found_where_both_witnesses_are_asked(
    labs, tmp_path, more
):
    """Each has witnessed what is in order, of lab-x, to which neither has a line."""
    folders, name = [tmp_path / "one", tmp_path / "other"], f"lab-x{more}"
    audit_log.Log(folders[0], name).close()
    shutil.copytree(*folders)
    for folder, lab, count in zip(folders, (labs.s, labs.t), (1, more), strict=True):
        seen = witness.Witness(lab.folder.audit)
        with audit_log.Log(folder, name) as log:
            for _ in range(count):
                log.append("job", lab.switch.state.lab)
            seen.keep(name, log.sign_head().text, [], log.verifier.text)
    verify = ("audit", "verify", "--folder")
    for folder, lab, other in zip(
        folders, (labs.s, labs.t), ("lab-t", "lab-s"), strict=True
    ):
        found = nebula_command.run(*verify, folder, "--federation", lab.folder.path)
        assert found.status == 1
        assert f"that {other} has seen" in found.out


def test_both_labs_have_counted_the_same_bytes_or_the_entry_is_named(lab, tmp_path):
    log = other_log(tmp_path / "t", 100, 200)
    with audit_log.Log(lab.folder.audit, "lab-s") as own:
        count_stream(own, "sent", "lab-t", 300, frames=2)
        own.sign_head()
    found = lab("audit", "verify", "--witnesses", 0, "--peer_copy", log)
    assert "this one and lab-t, have counted the same bytes" in found.out
    assert "it says itself" in found.out
    other_log(log, 5)
    found = lab("audit", "verify", "--witnesses", 0, "--peer_copy", log, status=1)
    assert "wrong: job m3, stream ab, tokens sent: 300 bytes" in found.out
    assert "305 bytes in 3 frames there" in found.out


# Each entry as it is shown.


@pytest.mark.parametrize(
    ("kind", "who", "what", "line"),
    [
        (
            *("job", "ana"),
            {"job": "m3", "commit": "0123", "event": "began", "clusters": ["a", "b"]},
            'ana: job began (clusters ["a", "b"], commit 0123, job m3)',
        ),
        ("odd", "", {"x": {"y": None}, "z": None}, 'somebody: odd (x {"y": null})'),
        ("odd", "ana", {}, "ana: odd"),
    ],
)
def test_an_entry_is_a_line_with_its_time(tmp_path, kind, who, what, line):
    with audit_logs.opened(tmp_path) as log:
        log.append(kind, who, **what)
    (found,) = audits.shown(tmp_path)
    assert found == f"2026-11-22 14:03:11  {line}"


def test_texts_of_others_stay_in_their_line(tmp_path):
    bad = "x\n2026-11-22 14:03:11  eve granted all\x1b[2J\u202e\ud800"
    with audit_logs.opened(tmp_path) as log:
        for kind in ("job", "account.add"):
            log.append(
                kind, bad, **{"event": bad, "job": bad, "bytes": bad, bad: [bad]}
            )
            log.append(kind, "ana", event=3, job={"a": bad}, until=None)
            log.append(kind, "ana", event=bad, lab=[bad], bytes=bad, entry=[bad])
    found = list(audits.shown(tmp_path))
    assert len(found) == 6
    assert all(line.isprintable() and len(line) <= 4000 for line in found)
    assert all("x\ufffd2026" in line for line in found[::3])


def test_a_line_that_cannot_be_read_is_not_the_last(tmp_path):
    with audit_logs.opened(tmp_path) as log:
        log.append("job", "ana")
        audit_logs.write_line(log, b"\x1b junk")
        log.append("job", "bob")
    first, second, third = audits.shown(tmp_path)
    assert second == f"{'?':19}  entry 1 cannot be read: b'\\x1b junk'"
    assert (first[21:], third[21:]) == ("ana: job", "bob: job")


def test_a_clock_that_was_set_back_is_marked(tmp_path):
    clock = audit_logs.Clock()
    with audit_log.Log(tmp_path, "lab-s", clock) as log:
        for step in (1, 1, -9000, 1):
            clock.step *= 0
            clock.now += type(clock.step)(seconds=step)
            log.append("job", "ana")
        log.sign_head()
    marks = ["set back" in line for line in audits.shown(tmp_path)]
    assert marks == [False, False, True, False]
    assert audit_verify.verify(tmp_path) == []  # the clock changes no order
