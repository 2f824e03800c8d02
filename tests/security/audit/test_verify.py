"""Whoever changes an audit log is found out, and the entry is named where it can be."""

import collections
import io
import random
import shutil
import tracemalloc

import pytest
from audit_logs import Clock, copied, exchange, fill, opened

from nebula_jax.security import audit
from nebula_jax.security.audit import checkpoint_note, merkle, witness
from nebula_jax.security.audit import log as audit_log
from nebula_jax.security.audit import verify as audit_verify

FILES = audit_verify.Copy._fields
SIGNED = FILES[:3]  # an older cosignature is no change of the log


def grown(folder, peer):
    """Makes a log of 61 entries, which a peer cosigns six times.

    Returns:
      A copy of it at each of the six checkpoints, and its key.
    """
    copies = []
    with opened(folder) as log:
        for begin in range(0, 60, 10):
            fill(log, 10, begin)
            exchange(log, peer)
            copies.append(copied(folder))
        return copies, checkpoint_note.read_verifier(log.verifier)


@pytest.fixture(scope="module")
def history(tmp_path_factory):
    """Copies of one log at each of six checkpoints, what a peer saw of it, its key."""
    folder = tmp_path_factory.mktemp("history")
    peer = witness.Witness(folder / "t", "lab-t")
    copies, who = grown(folder / "s", peer)
    return copies, ("lab-t", peer.seen("lab-s").note.text), who


@pytest.fixture
def lab(tmp_path):
    """The folder of a log of 61 entries with seven checkpoints, and its peer."""
    peer = witness.Witness(tmp_path / "t", "lab-t")
    grown(tmp_path / "s", peer)
    return tmp_path / "s", peer


def examined(copy, who, seen=()):
    """What is found in the bytes of an audit log."""
    files = copy._replace(log=io.BytesIO(copy.log), leaves=io.BytesIO(copy.leaves))
    return audit_verify.examine(files, who, seen)


def with_lines(history, lines, **others):
    """What is found in the newest copy with other lines."""
    copies, _, who = history
    return examined(copies[-1]._replace(log=b"".join(lines), **others), who)


def lines_of(copy):
    return copy.log.splitlines(True)


def forged(lines):
    """Returns the hashes of lines: who alters an entry can alter its hash as well."""
    return b"".join(merkle.leaf(line[:-1]) for line in lines)


def named(findings):
    """Returns the first finding's file and entries."""
    return findings[0][:3]


# Ten thousand random mutations.


def units(name, data):
    if name == "leaves":
        return [data[i : i + 32] for i in range(0, len(data), 32)]
    return data.splitlines(True)


def flip(data, draw, parts):
    return flipped(data, draw.randrange(8 * len(data)))


def flipped(data, place):
    """Returns bytes with one bit flipped."""
    changed = bytearray(data)
    changed[place // 8] ^= 1 << place % 8
    return bytes(changed)


def drop(data, draw, parts):
    del parts[draw.randrange(len(parts))]
    return b"".join(parts)


def swap(data, draw, parts):
    i, j = draw.randrange(len(parts)), draw.randrange(len(parts))
    parts[i], parts[j] = parts[j], parts[i]
    return b"".join(parts)


def truncate(data, draw, parts):
    return data[: draw.randrange(len(data))]


def splice(data, draw, parts):
    begin, end = sorted(draw.choices(range(len(data) + 1), k=2))
    place = draw.randrange(len(data) + 1)
    over = draw.choice((0, end - begin))
    return data[:place] + data[begin:end] + data[place + over :]


def repeat(data, draw, parts):
    parts.insert(draw.randrange(len(parts) + 1), draw.choice(parts))
    return b"".join(parts)


MUTATIONS = (flip, drop, swap, truncate, splice, repeat)


def mutate(copies, draw):
    """Returns a name and a copy that is not the newest one."""
    newest = copies[-1]
    kind = draw.choice((*MUTATIONS, "roll back", "mix", "forge"))
    if kind == "roll back":
        return kind, draw.choice(copies[:-1])
    if kind == "mix":
        return kind, newest._replace(
            **{
                name: getattr(draw.choice(copies), name)
                for name in draw.sample(SIGNED, draw.randrange(1, 4))
            }
        )
    if kind == "forge":  # a line and its hash alike, and so that it is an entry
        log = draw.choice(MUTATIONS)(newest.log, draw, lines_of(newest))
        lines = [line + b"\n" for line in log.split(b"\n")[:-1]]
        if lines[:61] == lines_of(newest):
            return kind, newest  # more entries, as the lab may append
        return kind, newest._replace(log=b"".join(lines), leaves=forged(lines))
    name = draw.choice(FILES)
    whole = getattr(newest, name)
    data = kind(whole, draw, units(name, whole))
    if name == "log" and kind is repeat and data.startswith(newest.log):
        return kind, newest  # likewise: nothing protects what no checkpoint covers
    return f"{kind.__name__} {name}", newest._replace(**{name: data})


def test_ten_thousand_mutations_are_all_found(history):
    copies, seen, who = history
    draw = random.Random(20261122)
    counts = collections.Counter()
    for _ in range(10_000):
        name, mutant = mutate(copies, draw)
        while mutant == copies[-1]:
            name, mutant = mutate(copies, draw)
        counts[name] += 1
        assert examined(mutant, who, [seen]), name
    assert len(counts) == 3 + len(MUTATIONS) * len(FILES)
    assert min(counts.values()) > 50


def test_nothing_is_found_where_nothing_was_changed(history):
    copies, seen, who = history
    for copy in copies:
        assert examined(copy, who) == []
    assert examined(copies[-1], who, [seen]) == []


# Which entry it was.


@pytest.mark.parametrize("index", [0, 1, 9, 10, 30, 59, 60])
def test_a_flipped_bit_of_any_line_names_it(history, index):
    lines = lines_of(history[0][-1])
    line = lines[index]
    for place in range(0, 8 * len(line), 5):
        lines[index] = flipped(line, place)
        assert named(with_lines(history, lines)) == ("log.jsonl", index, index)


@pytest.mark.parametrize("index", [0, 1, 9, 10, 30, 58])
def test_entries_that_were_removed_exchanged_or_put_in(history, index):
    for change in (
        lambda lines: lines.pop(index),
        lambda lines: lines.insert(index, b"{}\n"),
        lambda lines: lines.insert(index, lines.pop(index + 1)),
    ):
        lines = lines_of(history[0][-1])
        change(lines)
        assert named(with_lines(history, lines)) == ("log.jsonl", index, index)


@pytest.mark.parametrize("left", [0, 1, 30, 59])
def test_a_cut_tail_names_the_first_entry_that_is_missing(history, left):
    lines = lines_of(history[0][-1])[:left]
    found = with_lines(history, lines)
    assert found[0].first == left
    assert "are missing" in str(found[0])
    torn = with_lines(history, [*lines, b'{"kind"'])
    assert any("has no end" in str(each) for each in torn)


def test_a_changed_hash_is_no_changed_entry(history):
    newest = history[0][-1]
    leaves = flipped(newest.leaves, 8 * (32 * 30 + 7))
    found = with_lines(history, [newest.log], leaves=leaves)
    assert [str(each) for each in found] == [
        "leaves.bin has another hash; the entries are as signed"
    ]


@pytest.mark.parametrize("index", [0, 9, 10, 60])
def test_an_entry_altered_with_its_hash_is_between_two_checkpoints(history, index):
    """Of the newest one of this lab, and of older ones that others have seen."""
    copies, _, who = history
    seen = [("lab-t", copy.checkpoint.decode()) for copy in copies]
    lines = lines_of(copies[-1])
    lines[index] = lines[index].replace(b"2026", b"2025", 1)
    copy = copies[-1]._replace(log=b"".join(lines), leaves=forged(lines))
    sizes = [0, *(checkpoint_note.read(text).checkpoint.size for _, text in seen)]
    first = max(size for size in sizes if size <= index)
    last = min(size for size in sizes if size > index) - 1
    found = examined(copy, who, seen)
    assert named(found) == ("log.jsonl", first, last)
    assert "one of them was altered" in str(found[0])


def test_a_line_that_no_entry_has(tmp_path):
    with opened(tmp_path) as log:
        fill(log, 3)
        log._write(b'{"kind": "job"}')
        log.sign_head()
    (found,) = audit_verify.verify(tmp_path)
    assert str(found) == "log.jsonl: entry 3 (line 4) is not written as an entry is"


# Rolling back, and signing anew.


def test_a_folder_rolled_back_to_a_valid_copy_is_found_by_the_peer(lab):
    folder, peer = lab
    older = shutil.copytree(folder, folder.parent / "older")
    with opened(folder) as log:
        fill(log, 5, 60)
        exchange(log, peer)
        verifier = log.verifier
    assert audit_verify.verify(older) == []  # nothing in it can show it
    seen = peer.seen("lab-s")
    found = audit_verify.verify(older, [("lab-t", seen.note.text)], seen.verifier.text)
    assert named(found) == ("log.jsonl", 61, 65)
    assert "was rolled back" in str(found[1])
    assert audit_verify.verify(folder, [("lab-t", seen.note.text)], verifier) == []
    with opened(older) as log:  # and it cannot go on from there
        fill(log, 9, 80)
        with pytest.raises(audit.AuditError, match="does not continue"):
            exchange(log, peer)
        log.sign_head()
    assert audit_verify.verify(older) == []
    found = audit_verify.verify(older, [("lab-t", seen.note.text)])
    assert named(found) == ("log.jsonl", 61, 65)
    assert "one of them was altered" in str(found[0])


def test_a_log_signed_anew_is_found_by_what_the_peer_has_seen(lab):
    folder, peer = lab
    others = shutil.ignore_patterns("l*", "c*")  # all but the two files of the key
    anew = shutil.copytree(folder, folder.parent / "anew", ignore=others)
    with opened(anew) as log:
        fill(log, 45)
        log.append("job", "eve", event="began", job="another")
        fill(log, 20, 45)
        log.sign_head()
    assert audit_verify.verify(anew) == []
    found = audit_verify.verify(anew, [("lab-t", peer.seen("lab-s").note.text)])
    assert named(found) == ("log.jsonl", 0, 60)


def test_two_signed_checkpoints_of_one_size(lab):
    folder, peer = lab
    fork = shutil.copytree(folder, folder.parent / "fork")
    for where, who in ((folder, "ana"), (fork, "eve")):
        with audit_log.Log(where, "lab-s", Clock()) as log:
            log.append("job", who)
            log.sign_head()
            if who == "ana":
                exchange(log, peer)
            else:
                with pytest.raises(audit.AuditError, match="two audit logs"):
                    exchange(log, peer)
    found = audit_verify.verify(fork, [("lab-t", peer.seen("lab-s").note.text)])
    assert any("the lab keeps two logs of one name" in str(each) for each in found)
    # Two views, each shown to another peer: their notes side by side.
    text = audit.paths(fork).checkpoint.read_text()
    found = audit_verify.verify(folder, [("lab-u", text)])
    assert any("the lab keeps two logs of one name" in str(each) for each in found)


# Checkpoints and keys.


def test_missing_files(lab):
    folder, _ = lab
    for name in ("log.jsonl", "leaves.bin", "checkpoint", "verifier"):
        copy = shutil.copytree(folder, folder.parent / f"without-{name}")
        (copy / name).unlink()
        assert name in {each.file for each in audit_verify.verify(copy)}
    (shutil.copytree(folder, folder.parent / "alone") / "cosigned.json").unlink()
    assert audit_verify.verify(folder.parent / "alone") == []
    found = audit_verify.verify(folder.parent / "nowhere")
    assert [str(each) for each in found] == [
        "verifier is missing, or not the public key of this log"
    ]


def test_the_key_that_the_reader_has_counts(lab, tmp_path):
    folder, peer = lab
    with opened(tmp_path / "other") as log:
        other = log.verifier
    found = audit_verify.verify(folder, verifier=other)
    assert "verifier" in {each.file for each in found}
    assert any("not signed with the key of this log" in str(each) for each in found)
    assert audit_verify.verify(folder, verifier=peer.seen("lab-s").verifier.text) == []
    # A forger may replace all files with those of a log of his own.
    shutil.copytree(folder.parent / "other", tmp_path / "forged")
    assert audit_verify.verify(tmp_path / "forged") == []
    seen = peer.seen("lab-s")
    assert audit_verify.verify(tmp_path / "forged", verifier=seen.verifier.text)
    found = audit_verify.verify(tmp_path / "forged", [("lab-t", seen.note.text)])
    assert any("another key than what lab-t has" in str(each) for each in found)
    with pytest.raises(checkpoint_note.NoteError):
        audit_verify.verify(folder, verifier="junk")


def test_a_copy_is_verified_without_its_secrets_and_without_writing(lab, tmp_path):
    folder, _ = lab
    secret = shutil.ignore_patterns("key.pem", "lock")
    copy = shutil.copytree(folder, tmp_path / "copy", ignore=secret)
    for path in copy.iterdir():
        path.chmod(0o400)
    copy.chmod(0o500)
    assert audit_verify.verify(copy) == []
    copy.chmod(0o700)


# Logs of a size that a year brings.


def test_a_large_log_is_verified_in_linear_time(tmp_path, monkeypatch):
    size = 20_000
    with opened(tmp_path) as log:
        for begin in (0, size // 2):
            fill(log, size // 2, begin)
            log.sign_head()
    node, count = merkle.node, []
    monkeypatch.setattr(
        merkle, "node", lambda left, right: count.append(1) or node(left, right)
    )
    assert audit_verify.verify(tmp_path) == []
    assert len(count) < 100  # roots of a tree that is there, not trees


def test_nobody_waits_to_append_while_a_log_is_read(tmp_path, monkeypatch):
    """Not even if who reads is stopped: a switch appends in the loop of its streams."""
    with audit_log.Log(tmp_path, "lab-s") as log:
        log.append("job", "ana", event="began")
        log.sign_head()
        examine = audit_verify.examine

        def stopped(*values):
            log.append("job", "ana", event="went on")
            return examine(*values)

        monkeypatch.setattr(audit_verify, "examine", stopped)
        assert not audit_verify.verify(tmp_path)


def test_a_log_is_neither_opened_nor_verified_in_memory(tmp_path):
    """Strangers make it grow, however slowly: it is read line by line."""
    with opened(tmp_path) as log:
        for number in range(500):
            log.append("job", "ana", number=number, text=["x" * 4000] * 4)
        log.sign_head()
    size = audit.paths(tmp_path).log.stat().st_size
    tracemalloc.start()
    try:
        assert audit_verify.verify(tmp_path) == []
        opened(tmp_path).close()
        assert tracemalloc.get_traced_memory()[1] < size / 8
    finally:
        tracemalloc.stop()
