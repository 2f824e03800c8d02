"""Both sides of a line have counted the same, or the first difference is named."""

import itertools

import pytest
from audit_logs import opened

from nebula_jax.security.audit import counts as audit_counts
from nebula_jax.security.audit import entries as audit_entries
from nebula_jax.security.audit import files as audit_files


def stream(job, name, kind, size, frames, **more):
    counts = {"bytes": size, "frames": frames}
    return {"job": job, "stream": name, "kind": kind, **counts, **more}


def log_of(*whats, kind="stream"):
    return [
        audit_entries.Entry(index, kind, "", "switch", what)
        for index, what in enumerate(whats)
    ]


def test_counts_that_agree_however_they_are_cut():
    ours = log_of(
        stream("m3", "g0", "hidden", 100, 1),
        stream("m3", "g0", "grad", 10, 1),
        stream("m3", "g0", "hidden", 200, 2),
    )
    peers = log_of(
        stream("m3", "g0", "grad", 10, 1), stream("m3", "g0", "hidden", 300, 3)
    )
    assert audit_counts.compare(ours, peers) == []
    assert audit_counts.compare([], log_of(stream("m3", "g0", "x", 0, 0))) == []


def test_the_first_difference_is_named():
    ours = log_of(
        stream("m3", "g0", "hidden", 100, 1),
        stream("m3", "g0", "grad", 10, 1),
        stream("m3", "g0", "hidden", 200, 2),
        stream("m3", "g0", "grad", 10, 1),
        stream("m3", "g0", "hidden", 300, 3),
    )
    peers = log_of(
        stream("m3", "g0", "hidden", 100, 1),
        stream("m3", "g0", "hidden", 199, 2),
        stream("m3", "g0", "hidden", 300, 3),
        stream("m3", "g0", "grad", 10, 1),
    )
    first, second = audit_counts.compare(ours, peers)
    assert (first.stream, first.entry, first.peers_entry) == (
        ("m3", "g0", "hidden", ""), 2, 1,
    )  # fmt: skip
    assert str(first) == (
        "job m3, stream g0, hidden: 600 bytes in 6 frames here, 599 bytes in 6 frames"
        " there; they part at entry 2 of our log and entry 1 of the peer's log"
    )
    assert (second.stream, second.entry, second.peers_entry) == (
        ("m3", "g0", "grad", ""), 3, None,
    )  # fmt: skip


def test_streams_that_one_side_has_not_counted():
    ours = log_of(stream("m3", "g0", "hidden", 100, 1))
    (found,) = audit_counts.compare(ours, [])
    assert (found.entry, found.peers_entry, found.peers) == (0, None, (0, 0))
    (found,) = audit_counts.compare([], ours)
    assert (found.entry, found.peers_entry, found.ours) == (None, 0, (0, 0))


def test_frames_count_as_well_as_bytes():
    (found,) = audit_counts.compare(
        log_of(stream("m3", "g0", "x", 100, 1)), log_of(stream("m3", "g0", "x", 100, 2))
    )
    assert found.entry == 0


def test_entries_of_other_kinds_and_lines_are_left_out():
    what = stream("m3", "g0", "x", 1, 1)
    assert audit_counts.compare(log_of(what, kind="job"), []) == []
    ours = log_of({**what, "peer": "lab-t"}, {**what, "peer": "lab-u"})
    peers = log_of({**what, "peer": "lab-s"})
    assert audit_counts.compare(ours, peers, "lab-s", "lab-t") == []
    assert len(audit_counts.compare(ours, peers)) == 1


def test_what_one_side_sent_the_other_received():
    out = stream("m3", "g0", "hidden", 100, 1, direction="sent")
    back = stream("m3", "g0", "hidden", 7, 1, direction="received")
    turned = [{**out, "direction": "received"}, {**back, "direction": "sent"}]
    assert audit_counts.compare(log_of(out, back), log_of(*turned)) == []
    first, second = audit_counts.compare(log_of(out, back), log_of(out, back))
    assert (first.stream.direction, second.stream.direction) == ("sent", "received")
    assert str(first).startswith(
        "job m3, stream g0, hidden sent: 100 bytes in 1 frames"
    )


FIELDS = ("job", "stream", "kind", "direction", "bytes", "frames")


@pytest.mark.parametrize("field", FIELDS)
def test_entries_that_count_nothing(field):
    for value in (None, [], {}, -1, 1.5, True):
        what = stream("m3", "g0", "x", 1, 1) | {field: value}
        for ours, peers, words in (
            (log_of(what), [], "entry 0 of our log counts no stream"),
            ([], log_of(what), "entry 0 of the peer's log counts no stream"),
        ):
            with pytest.raises(audit_files.AuditError, match=words):
                audit_counts.compare(ours, peers)


def test_names_of_others_are_printable():
    (found,) = audit_counts.compare(log_of(stream("\x1b[2J", "\n", "\u202e", 1, 1)), [])
    assert str(found).isprintable()


def test_two_folders(tmp_path):
    with opened(tmp_path / "s", "lab-s") as ours, opened(tmp_path / "t", "lab-t") as t:
        for log, peer in itertools.product((ours, t), ("lab-s", "lab-t", "lab-u")):
            what = stream("m3", "g0", "hidden", 5 + (peer == "lab-u"), 1, peer=peer)
            log.append("stream", "switch", **what)
    assert audit_counts.reconcile(tmp_path / "s", tmp_path / "t") == []
    with opened(tmp_path / "t", "lab-t") as log:
        log.append("stream", "switch", **stream("m3", "g0", "hidden", 1, 1))
    (found,) = audit_counts.reconcile(tmp_path / "s", tmp_path / "t")
    assert (found.ours.bytes, found.peers.bytes) == (5, 6)
    (tmp_path / "t" / "verifier").write_text("junk")
    with pytest.raises(audit_files.AuditError, match="is no public key of a log"):
        audit_counts.reconcile(tmp_path / "s", tmp_path / "t")
    (tmp_path / "t" / "verifier").unlink()
    with pytest.raises(audit_files.AuditError, match="No such file"):
        audit_counts.reconcile(tmp_path / "s", tmp_path / "t")
