"""Whoever changes an audit log is found out, and the entry is named where it can be."""

import collections
import io
import random
import re
import shutil
import tracemalloc

import pytest
from audit_logs import Clock, Peer, copied, fill, opened, write_line

from nebula_jax.security import audit
from nebula_jax.security.audit import log as audit_log
from nebula_jax.security.audit import signed_heads
from nebula_jax.security.audit import verify as audit_verify

FILES = audit_verify.Copy._fields
SIGNED = FILES[:2]  # an older cosignature is no change of the log


def grown(folder, peer):
    """Makes a log of 60 entries, which a peer cosigns six times; returns a copy of it
    at each of the six heads, and its key."""
    copies = []
    with opened(folder) as log:
        for begin in range(0, 60, 10):
            fill(log, 10, begin)
            peer.exchange(log)
            copies.append(copied(folder))
        return copies, log.verifier


@pytest.fixture(scope="module")
def history(tmp_path_factory):
    """Copies of one log at each of six heads, what a peer saw of it, its key."""
    folder = tmp_path_factory.mktemp("history")
    peer = Peer(folder / "t")
    copies, who = grown(folder / "s", peer)
    return copies, ("lab-t", peer.witness.seen("lab-s").head), who


@pytest.fixture
def lab(tmp_path):
    """The folder of a log of 60 entries with seven heads, and its peer."""
    peer = Peer(tmp_path / "t")
    grown(tmp_path / "s", peer)
    return tmp_path / "s", peer


def examined(copy, who, seen=()):
    """What is found in the bytes of an audit log."""
    files = copy._replace(log=io.BytesIO(copy.log))
    return audit_verify.examine(files, who, seen)


def with_lines(history, lines):
    """What is found in the newest copy with other lines."""
    copies, _, who = history
    return examined(copies[-1]._replace(log=b"".join(lines)), who)


def lines_of(copy):
    return copy.log.splitlines(True)


def forged(lines):
    """Returns lines that follow each other: who alters one can alter all after it."""
    root, found = signed_heads.EMPTY, []
    for line in lines:
        found.append(line[:10] + root.hex().encode() + line[74:])
        root = signed_heads.chained(root, [signed_heads.leaf(found[-1][:-1])])
    return found


# What `_unlinked` and `_compare` say.
UNLINKED = re.compile(r"log\.jsonl: entry (\d+) \(line \d+\) does not (?:follow|begin)")
COVERED = re.compile(
    r"log\.jsonl: entr(?:y|ies) (\d+)(?: to (\d+))? .* (missing|not as)"
)


def unlinked(findings):
    """Returns the entry of which the first finding says that it does not follow."""
    return int(UNLINKED.match(findings[0])[1])


def covered(findings):
    """Returns the first and last entry that a head covers otherwise, and what is so."""
    first, last, what = COVERED.match(findings[0]).groups()
    return int(first), int(last or first), what


# Ten thousand random mutations.


def flip(data, draw, parts):
    return flipped(data, draw.randrange(8 * len(data)))


def flipped(data, place):
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
                for name in draw.sample(SIGNED, draw.randrange(1, 3))
            }
        )
    if kind == "forge":  # all lines after a change follow from it
        log = draw.choice(MUTATIONS)(newest.log, draw, lines_of(newest))
        lines = [line + b"\n" for line in log.split(b"\n")[:-1]]
        if lines[:60] == lines_of(newest):
            return kind, newest  # more entries, as the lab may append
        return kind, newest._replace(log=b"".join(forged(lines)))
    name = draw.choice(FILES)
    whole = getattr(newest, name)
    data = kind(whole, draw, whole.splitlines(True))
    if name == "log" and kind is repeat and data.startswith(newest.log):
        return kind, newest  # likewise: nothing protects what no head covers
    if name == "cosigned" and not data:
        return kind, newest  # a cosignature that is gone is no change of the log
    return f"{kind.__name__} {name}", newest._replace(**{name: data})


@pytest.mark.parametrize(
    "mutations", [1_000, pytest.param(10_000, marks=pytest.mark.slow)]
)
def test_all_mutations_are_found(history, mutations):
    copies, seen, who = history
    draw = random.Random(20261122)
    counts = collections.Counter()
    for _ in range(mutations):
        name, mutant = mutate(copies, draw)
        while mutant == copies[-1]:
            name, mutant = mutate(copies, draw)
        counts[name] += 1
        assert examined(mutant, who, [seen]), name
    # The two short files have one line: to drop that of `cosigned`, or to exchange one
    # with itself, changes nothing.
    assert len(counts) == 3 + len(MUTATIONS) * len(FILES) - 3
    assert min(counts.values()) > mutations / 200


def test_nothing_is_found_where_nothing_was_changed(history):
    copies, seen, who = history
    for copy in copies:
        assert examined(copy, who) == []
    assert examined(copies[-1], who, [seen]) == []


# Which entry it was.


@pytest.mark.parametrize("index", [0, 1, 9, 10, 30, 59])
def test_a_flipped_bit_of_any_line_names_it_or_the_next(history, index):
    lines = lines_of(history[0][-1])
    line = lines[index]
    for place in range(0, 8 * len(line), 5):
        lines[index] = flipped(line, place)
        found = with_lines(history, lines)
        if any("no end" in each for each in found):
            assert covered(found)[::2] == (index, "missing")
        elif index == 59 and place >= 8 * 76:  # of what it says: nothing follows
            assert covered(found)[1:] == (59, "not as")
        else:
            assert unlinked(found) in (index, index + 1)


@pytest.mark.parametrize("index", [0, 1, 9, 10, 30, 58])
def test_entries_that_were_removed_exchanged_or_put_in(history, index):
    for change in (
        lambda lines: lines.pop(index),
        lambda lines: lines.insert(index, b"{}\n"),
        lambda lines: lines.insert(index, lines.pop(index + 1)),
    ):
        lines = lines_of(history[0][-1])
        change(lines)
        assert unlinked(with_lines(history, lines)) == index


@pytest.mark.parametrize("left", [0, 1, 30, 59])
def test_a_cut_tail_names_the_first_entry_that_is_missing(history, left):
    lines = lines_of(history[0][-1])[:left]
    found = with_lines(history, lines)
    assert covered(found)[::2] == (left, "missing")
    torn = with_lines(history, [*lines, b'{"kind"'])
    assert any("has no end" in each for each in torn)


@pytest.mark.parametrize("index", [0, 9, 10, 59])
def test_an_entry_altered_with_all_that_follow_is_between_two_heads(history, index):
    """Of the newest one of this lab, and of older ones that others have seen."""
    copies, _, who = history
    heads = [signed_heads.read(copy.head.decode().rstrip()) for copy in copies]
    lines = lines_of(copies[-1])
    lines[index] = lines[index].replace(b'"time":"2', b'"time":"1')
    copy = copies[-1]._replace(log=b"".join(forged(lines)))
    sizes = [0, *(head.size for head in heads)]
    seen = [("lab-t", head) for head in heads]
    first = max(size for size in sizes if size <= index)
    last = min(size for size in sizes if size > index) - 1
    assert covered(examined(copy, who, seen)) == (first, last, "not as")


def test_a_line_that_no_entry_has(tmp_path):
    with opened(tmp_path) as log:
        fill(log, 3)
        write_line(log, b'{"after":"%s", "x": 1}' % log._roots[-1].hex().encode())
        log.sign_head()
    assert audit_verify.verify(tmp_path) == [
        "log.jsonl: entry 3 (line 4) is not written as an entry is"
    ]


# Rolling back, and signing anew.


def test_a_folder_rolled_back_to_a_valid_copy_is_found_by_the_peer(lab):
    folder, peer = lab
    older = shutil.copytree(folder, folder.parent / "older")
    with opened(folder) as log:
        fill(log, 5, 60)
        peer.exchange(log)
        verifier = log.verifier
    assert audit_verify.verify(older) == []  # nothing in it can show it
    seen = peer.witness.seen("lab-s")
    found = audit_verify.verify(older, [("lab-t", seen.head)], seen.verifier)
    assert covered(found) == (60, 64, "missing")
    assert "was rolled back" in found[1]
    assert audit_verify.verify(folder, [("lab-t", seen.head)], verifier) == []
    with opened(older) as log:  # and it cannot go on from there
        fill(log, 9, 80)
        with pytest.raises(audit.AuditError, match="does not continue"):
            peer.exchange(log)
        log.sign_head()
    assert audit_verify.verify(older) == []
    found = audit_verify.verify(older, [("lab-t", seen.head)])
    assert covered(found) == (60, 64, "not as")


def test_a_log_signed_anew_is_found_by_what_the_peer_has_seen(lab):
    folder, peer = lab
    others = shutil.ignore_patterns("l*", "c*", "head")  # all but the files of the key
    anew = shutil.copytree(folder, folder.parent / "anew", ignore=others)
    with opened(anew) as log:
        fill(log, 45)
        log.append("job", "eve", event="began", job="another")
        fill(log, 20, 45)
        log.sign_head()
    assert audit_verify.verify(anew) == []
    found = audit_verify.verify(anew, [("lab-t", peer.witness.seen("lab-s").head)])
    assert covered(found) == (0, 59, "not as")


def test_two_signed_heads_of_one_size(lab):
    folder, peer = lab
    fork = shutil.copytree(folder, folder.parent / "fork")
    for where, who in ((folder, "ana"), (fork, "eve")):
        with audit_log.Log(where, "lab-s", Clock()) as log:
            log.append("job", who)
            log.sign_head()
            if who == "ana":
                peer.exchange(log)
            else:
                with pytest.raises(audit.AuditError, match="two audit logs"):
                    peer.exchange(log)
    found = audit_verify.verify(fork, [("lab-t", peer.witness.seen("lab-s").head)])
    assert any("the lab keeps two logs of one name" in each for each in found)
    # Two views, each shown to another peer: their heads side by side.
    head = signed_heads.read(audit.paths(fork).head.read_text().rstrip())
    found = audit_verify.verify(folder, [("lab-u", head)])
    assert any("the lab keeps two logs of one name" in each for each in found)


# Heads and keys.


def test_missing_files(lab):
    folder, _ = lab
    for name in ("log.jsonl", "head", "verifier"):
        copy = shutil.copytree(folder, folder.parent / f"without-{name}")
        (copy / name).unlink()
        assert any(each.startswith(name) for each in audit_verify.verify(copy))
    (shutil.copytree(folder, folder.parent / "alone") / "cosigned").unlink()
    assert audit_verify.verify(folder.parent / "alone") == []
    assert audit_verify.verify(folder.parent / "nowhere") == [
        "verifier is missing, or not the public key of this log"
    ]


def test_the_key_that_the_reader_has_counts(lab, tmp_path):
    folder, peer = lab
    with opened(tmp_path / "other") as log:
        other = log.verifier
    found = audit_verify.verify(folder, verifier=other)
    assert any(each.startswith("verifier") for each in found)
    assert any("not signed with the key of this log" in each for each in found)
    assert (
        audit_verify.verify(folder, verifier=peer.witness.seen("lab-s").verifier) == []
    )
    # A forger may replace all files with those of a log of his own.
    shutil.copytree(folder.parent / "other", tmp_path / "forged")
    assert audit_verify.verify(tmp_path / "forged") == []
    seen = peer.witness.seen("lab-s")
    assert audit_verify.verify(tmp_path / "forged", verifier=seen.verifier)
    found = audit_verify.verify(tmp_path / "forged", [("lab-t", seen.head)])
    assert any("another key than what lab-t has" in each for each in found)


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
