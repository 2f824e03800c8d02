"""The log of a lab: appended to by threads, and whole again after every accident."""

import collections
import concurrent.futures
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading

import pytest
from audit_logs import Peer, fill, opened, size

from nebula_jax import errors
from nebula_jax.security import audit, private_files
from nebula_jax.security.audit import entries as audit_entries
from nebula_jax.security.audit import log as audit_log
from nebula_jax.security.audit import signed_heads
from nebula_jax.security.audit import verify as audit_verify

APPENDER = """
import pathlib, sys
from nebula_jax.security.audit import log as audit_log
with audit_log.Log(pathlib.Path(sys.argv[1]), "lab-s") as log:
    print("ready", flush=True)
    for number in range(100_000):
        index = log.append("job", "killed", number=number)
        if number % 8 == 0:
            log.commit()
            print(index, flush=True)
        if number % 50 == 49:
            log.sign_head()
"""


def entries(folder):
    return list(audit_entries.read(folder))


def newest(folder):
    """The newest signed head."""
    return signed_heads.read(audit.paths(folder).head.read_text().rstrip())


def cosigned(folder, peer="lab-t"):
    """The newest head that a peer has cosigned, and its cosignature."""
    return signed_heads.cosigned_in(folder)[peer]


def whole(folder):
    """Asserts that nothing is wrong with a folder."""
    assert audit_verify.verify(folder) == []


def signed_again(folder):
    """Asserts that a log opens, goes on and verifies."""
    with opened(folder) as log:
        log.sign_head()
    whole(folder)


@pytest.fixture
def log(tmp_path):
    """A log of 5 entries, open, which is whole in the end."""
    with opened(tmp_path / "s") as log:
        fill(log, 5)
        yield log
    whole(tmp_path / "s")


def test_a_log_from_its_beginning(tmp_path):
    folder = tmp_path / "federation" / "audit"
    with opened(folder) as log:
        assert newest(folder)[1:3] == (0, bytes(32).hex())
        assert log.append("federation", "ana", event="began", lab="lab-s") == 0
        assert log.append("job", "ana", event="began", job="m3", kind="x") == 1
        head = log.sign_head()
        lines = list(audit_entries.lines(folder))
        hashes = [signed_heads.leaf(line) for line in lines]
        roots = [
            signed_heads.chained(bytes(32), hashes[:count]).hex() for count in range(3)
        ]
        assert [json.loads(line)["after"] for line in lines] == roots[:2]
        assert head[:3] == ("lab-s", 2, roots[2])
        assert signed_heads.is_signed(head, log.verifier)
        assert log.sign_head() == head
    assert [(each.number, each.kind, each.what) for each in entries(folder)] == [
        (0, "federation", {"event": "began", "lab": "lab-s"}),
        (1, "job", {"event": "began", "job": "m3", "kind": "x"}),
    ]
    assert newest(folder) == head
    assert audit.paths(folder).verifier.read_text() == f"{log.verifier.text}\n"
    whole(folder)


def test_nobody_else_can_read_it(tmp_path):
    folder = tmp_path / "audit"
    with opened(folder) as log:
        fill(log, 3)
        log.sign_head()
    assert folder.stat().st_mode & 0o777 == 0o700
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert set(modes.values()) == {0o600}, modes
    (folder / "key.pem").chmod(0o640)
    with pytest.raises(private_files.PrivateFileError, match="chmod 600"):
        opened(folder)


def test_a_log_goes_on_where_it_was(tmp_path):
    with opened(tmp_path) as log:
        fill(log, 5)
        first = log.sign_head()
        verifier = log.verifier
        fill(log, 3, 5)
    with opened(tmp_path) as log:
        assert size(tmp_path) == 8
        assert newest(tmp_path) == first
        assert log.verifier == verifier
        fill(log, 2, 8)
        second, leaves = log.head_after(5)
        assert (second.size, second) == (10, newest(tmp_path))
        assert signed_heads.continues(first, second, leaves)
        with pytest.raises(audit.AuditError, match="has 10 entries, not 11"):
            log.head_after(11)
    whole(tmp_path)


def test_who_is_far_behind_is_given_a_head_at_a_time(log, monkeypatch):
    monkeypatch.setattr(audit_log, "MOST_LEAVES", 2)
    before, _ = log.head_after(0)
    fill(log, 5, 5)
    for count in (7, 9, 10, 10):
        head, leaves = log.head_after(before.size)
        assert (head.size, len(leaves)) == (count, count - before.size)
        assert signed_heads.is_signed(head, log.verifier)
        assert signed_heads.continues(before, head, leaves) or head == before
        before = head
    assert log.sign_head() == before


def test_a_refused_entry_leaves_nothing(log, tmp_path):
    for what in ({"password": "x"}, {"x": object()}, {"x": ["y" * 4096] * 20}):
        with pytest.raises(errors.NebulaError):
            log.append("job", "ana", **what)
    with pytest.raises(audit.AuditError, match="no kind"):
        log.append("No Kind", "ana")
    assert log.append("job", "ana") == 5
    log.sign_head()
    assert b"password" not in audit.paths(tmp_path / "s").log.read_bytes()


def test_threads_append_to_one_log_while_it_is_signed(log, tmp_path):
    def work(name):
        for number in range(150):
            log.append("job", name, number=number)
            if number % 10 == 0:
                log.sign_head()

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        list(pool.map(work, "abc"))
    log.sign_head()
    found = collections.defaultdict(list)
    for entry in entries(tmp_path / "s")[5:]:
        found[entry.who].append(entry.what["number"])
    assert found == {name: list(range(150)) for name in "abc"}


@pytest.mark.parametrize("name", ["write", "fdatasync"])
def test_nobody_waits_for_the_disk_to_append(log, tmp_path, monkeypatch, name):
    call, is_syncing, may_end = getattr(os, name), threading.Event(), threading.Event()

    def slow(*given):
        is_syncing.set()
        assert may_end.wait(20)
        return call(*given)

    monkeypatch.setattr(audit_log.os, name, slow)
    signing = threading.Thread(target=log.sign_head)
    signing.start()
    assert is_syncing.wait(20)
    assert log.append("job", "ana") == 5
    may_end.set()
    signing.join()
    assert newest(tmp_path / "s").size == 5


@pytest.mark.parametrize("patience", [1, 6])
def test_a_killed_process_loses_nothing_that_was_committed(
    tmp_path, patience, monkeypatch
):
    """Until then no other process has the log open."""
    monkeypatch.setattr(private_files, "LOCK_SECONDS", 0.05)
    with subprocess.Popen(
        [sys.executable, "-c", APPENDER, tmp_path], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        with pytest.raises(audit.AuditError, match="a switch of this lab that runs"):
            opened(tmp_path)
        committed = [int(process.stdout.readline()) for _ in range(20 * patience)]
        process.send_signal(signal.SIGKILL)
    signed_again(tmp_path)
    found = entries(tmp_path)
    assert len(found) > committed[-1]
    for entry in found:
        assert entry.who == "killed" or entry.what["event"] == audit_entries.CUT_OFF
    numbers = [entry.what["number"] for entry in found if entry.who == "killed"]
    assert numbers == list(range(len(numbers)))


# What a crash can leave behind the last head.


def crashed(folder):
    """Makes a log of 5 signed entries and 3 others; returns its paths."""
    with opened(folder) as log:
        fill(log, 5)
        log.sign_head()
        fill(log, 3, 5)
    return audit.paths(folder)


def mended(folder, kept_entries, cut):
    """Asserts that a log opens with so many entries, and one about what was cut off."""
    before = audit.paths(folder).log.read_bytes().splitlines()[:kept_entries]
    with opened(folder) as log:
        assert size(folder) == kept_entries + 1
        log.sign_head()
    whole(folder)
    assert audit.paths(folder).log.read_bytes().splitlines()[:kept_entries] == before
    last = entries(folder)[-1]
    assert (last.kind, last.who) == ("audit", "lab-s")
    assert last.what["event"] == audit_entries.CUT_OFF
    assert (last.what["entry"], last.what["bytes"]) == (kept_entries, len(cut))
    assert (folder / last.what["kept"]).read_bytes() == cut
    with opened(folder):
        assert size(folder) == kept_entries + 1


def test_every_cut_of_the_end_is_mended(tmp_path):
    """Whatever is left of what no head covers, the log opens and verifies."""
    paths = crashed(tmp_path / "s")
    log = paths.log.read_bytes()
    begin = len(b"".join(log.splitlines(True)[:5]))
    for end in (*range(begin, len(log), 17), len(log) - 1):
        left = log[:end]
        if left.endswith(b"\n"):
            continue
        folder = tmp_path / f"{end}"
        shutil.copytree(tmp_path / "s", folder)
        audit.paths(folder).log.write_bytes(left)
        mended(folder, left.count(b"\n"), cut=left[left.rindex(b"\n") + 1 :])


def test_what_a_power_cut_leaves_is_cut_off(tmp_path):
    paths = crashed(tmp_path)
    zeros = bytes(100) + b"\n" + bytes(50)
    with paths.log.open("ab") as stream:
        stream.write(zeros)
    mended(tmp_path, 8, cut=zeros)


def test_a_crash_before_the_first_signature(tmp_path):
    opened(tmp_path).close()
    audit.paths(tmp_path).head.unlink()
    signed_again(tmp_path)


# What a head covers is not mended.


def refused(folder, words):
    """Asserts that a log cannot be continued, and that its files stay as they are."""
    files = lambda: {path: path.read_bytes() for path in folder.iterdir()}  # noqa: E731
    before = files()
    with pytest.raises(audit.AuditError, match=words) as why:
        opened(folder)
    assert "\n" not in str(why.value)
    assert files() == before


@pytest.fixture
def signed(tmp_path):
    """The paths of a log of 8 entries, all signed."""
    crashed(tmp_path)
    signed_again(tmp_path)
    return audit.paths(tmp_path)


@pytest.fixture
def other(tmp_path_factory):
    """The paths of another log."""
    folder = tmp_path_factory.mktemp("other")
    opened(folder).close()
    return audit.paths(folder)


def test_signed_entries_that_were_changed(signed):
    log = signed.log.read_bytes()
    altered = log.replace(b"m0", b"m9", 1)
    for lines, words in (
        (log[:-1], r"entry 7 \(line 8\) is missing, and a signed head covers 8"),
        (altered, "its first 8 entries are not those that a head was"),
    ):
        signed.log.write_bytes(lines)
        refused(signed.log.parent, words)


def test_a_head_that_is_gone_or_junk_or_of_another_key(signed, other):
    for data, words in (
        (b"\xff", "is no signed head"),
        (b"junk", "is no signed head"),
        (b"", "is no signed head"),
        (other.head.read_bytes(), "is not signed with the key of this log"),
    ):
        signed.head.write_bytes(data)
        refused(signed.log.parent, words)
    signed.head.unlink()
    refused(signed.log.parent, "there are entries but no signed head")


# The key.


def test_the_key_of_a_log_is_the_one_it_began_with(signed, other):
    words = "is not signed with the key of this log"
    with pytest.raises(audit.AuditError, match=words):
        opened(signed.log.parent, "lab-t")
    signed.key.write_bytes(other.key.read_bytes())
    refused(signed.log.parent, words)
    signed.key.write_bytes(b"junk")
    refused(signed.log.parent, "is no private key of Ed25519")
    signed.key.unlink()
    refused(signed.log.parent, "key.pem: is missing: this log can be read and verified")
    whole(signed.log.parent)


# Disks that fail.


@pytest.fixture
def failing(monkeypatch):
    """A switch: from when it is set, writes of so many bytes and more fail half-way."""
    write, state = os.write, {"left": None}

    def failing_write(file, data):
        left = state["left"]
        if left is None or len(data) <= left:
            state["left"] = left if left is None else left - len(data)
            return write(file, data)
        write(file, data[:left])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(audit_log.os, "write", failing_write)
    return state


def broken(*given):
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def refuses_all(log, words="takes no more entries: mend it"):
    for call in (lambda: log.append("job", "ana"), log.sign_head, log.commit):
        with pytest.raises(audit.AuditError, match=words):
            call()
    log.close()


def test_a_full_disk_leaves_no_half_entry(log, tmp_path, failing):
    log.commit()
    path = audit.paths(tmp_path / "s").log
    before = path.read_bytes()
    assert log.append("job", "ana") == 5
    for left in (0, 1, 50, len(log._waiting) - 1):
        failing["left"] = left
        with pytest.raises(audit.AuditError, match="No space left on device"):
            log.commit()
        assert path.read_bytes() == before
    failing["left"] = None
    log.sign_head()  # somebody made room
    assert size(tmp_path / "s") == 6


def test_what_waits_for_a_disk_is_bounded(log, tmp_path, monkeypatch, failing):
    monkeypatch.setattr(audit_log, "MOST_WAITING", 2000)
    failing["left"] = 0
    with pytest.raises(audit.AuditError, match="the disk takes no entries"):
        fill(log, 100, 5)
    assert len(log._waiting) < 3000
    failing["left"] = None
    log.commit()
    assert log.append("job", "ana") == size(tmp_path / "s")


def test_a_disk_that_cannot_even_be_cut(tmp_path, failing, monkeypatch):
    log = opened(tmp_path)
    fill(log, 3)
    log.commit()
    log.append("job", "ana")
    failing["left"] = 10
    with monkeypatch.context() as patch:
        patch.setattr(audit_log.os, "ftruncate", broken)
        with pytest.raises(audit.AuditError, match="No space left on device"):
            log.commit()
    failing["left"] = None
    refuses_all(log)
    mended(tmp_path, 3, cut=audit.paths(tmp_path).log.read_bytes()[-10:])


def test_after_a_failed_sync_nothing_is_appended(tmp_path, monkeypatch):
    log = opened(tmp_path)
    fill(log, 3)
    with monkeypatch.context() as patch:
        patch.setattr(audit_log.os, "fdatasync", broken)
        with pytest.raises(audit.AuditError, match="Input/output error"):
            log.commit()
    refuses_all(log)
    signed_again(tmp_path)


@pytest.fixture
def synced(monkeypatch):
    """The files that were synced."""
    found = []
    monkeypatch.setattr(os, "fdatasync", found.append)
    return found


def test_commit_syncs_once_for_all_and_not_at_all_for_nothing(tmp_path, synced):
    with opened(tmp_path) as log:
        synced.clear()
        fill(log, 50)
        assert not synced
        for _ in range(2):
            log.commit()
            assert len(synced) == 1


def test_entries_are_on_the_disk_before_their_head_is_signed(tmp_path, synced):
    """A power cut could else leave a head of entries that are not there."""
    with opened(tmp_path) as log:
        fill(log, 3)
        synced.clear()
        log.sign_head()
        assert synced == [log._file]


def test_a_closed_log(tmp_path):
    log = opened(tmp_path)
    log.close()
    refuses_all(log, "is closed")


def test_paths_that_do_not_serve(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(audit.AuditError, match="the audit log needs it"):
        opened(tmp_path / "file" / "audit")
    (tmp_path / "audit").mkdir(0o700)
    (tmp_path / "audit" / "log.jsonl").symlink_to(tmp_path / "file")
    with pytest.raises(audit.AuditError, match=r"log\.jsonl: the audit log needs it"):
        opened(tmp_path / "audit")  # a link is not written through


# What peers sign.


@pytest.fixture
def peer(tmp_path):
    return Peer(tmp_path / "t")


def test_the_newest_cosignature_of_each_peer_is_kept(tmp_path, peer):
    folder = tmp_path / "s"
    with opened(folder) as log:
        assert log.cosigned("lab-t") == 0
        for begin in (0, 5, 10):
            fill(log, 5, begin)
            answer = peer.exchange(log)
            assert cosigned(folder) == (log.sign_head(), answer)
        other = Peer(tmp_path / "u", "lab-u")
        head, late = other.cosign(log)
        fill(log, 2, 15)
        peer.exchange(log)
        assert log.add_cosignature("lab-u", head.text, late.text)
        assert not log.add_cosignature("lab-u", head.text, late.text)
        assert cosigned(folder, "lab-u") == (head, late)
    whole(folder)
    with opened(folder) as log:
        sizes = [log.cosigned(lab) for lab in ("lab-t", "lab-u", "lab-x")]
        assert sizes == [17, 15, 0]
        assert peer.witness.size("lab-s") == 17
    whole(folder)


def test_cosignatures_that_do_not_hold(log, tmp_path, peer):
    with opened(tmp_path / "x") as other:
        fill(other, 4)
        head, answer = peer.cosign(log)
        elsewhere, of_other = Peer(tmp_path / "w").cosign(other)
        for words, lab, text, by in (
            ("does not hold", "lab-u", head.text, answer.text),
            ("does not hold", "lab-t", head.text, answer._replace(key="0" * 64).text),
            ("does not hold", "lab-t", elsewhere.text, answer.text),
            ("no signed head", "lab-t", "junk", answer.text),
            ("no cosignature", "lab-t", head.text, "junk"),
            ("that is not of this log", "lab-t", elsewhere.text, of_other.text),
        ):
            with pytest.raises(errors.NebulaError, match=words):
                log.add_cosignature(lab, text, by)
        assert log.cosigned("lab-t") == 0
        assert newest(tmp_path / "s") == head
