"""Both sides of a line have counted the same, or the first difference is named."""

import itertools

import pytest
from audit_logs import opened

from nebula_jax.security import audit
from nebula_jax.security.audit import counts as audit_counts
from nebula_jax.security.audit import entries as audit_entries

STREAM = ("job", "stream", "kind", "direction")


def sent(job, name, kind, size, frames, **more):
    counts = {"bytes": size, "frames": frames}
    names = dict(zip(STREAM, (job, name, kind, "sent"), strict=True))
    return {**names, **counts, **more}


def received(*given, **more):
    return sent(*given, **{"direction": "received", **more})


def compare(ours, peers, kind="stream"):
    """Compares what lab-s and lab-t have counted."""
    logs = (
        [
            audit_entries.Entry(index, kind, "", "switch", what)
            for index, what in enumerate(whats)
        ]
        for whats in (ours, peers)
    )
    return audit_counts.compare(*logs, "lab-s", "lab-t")


def test_counts_that_agree_however_they_are_cut():
    ours = (
        sent("m3", "g0", "hidden", 100, 1),
        received("m3", "g0", "grad", 10, 1),
        sent("m3", "g0", "hidden", 200, 2),
    )
    peers = (
        sent("m3", "g0", "grad", 10, 1),
        received("m3", "g0", "hidden", 300, 3),
    )
    assert compare(ours, peers) == []
    assert compare([], [sent("m3", "g0", "x", 0, 0)]) == []


def test_each_difference_is_named():
    ours = (
        sent("m3", "g0", "hidden", 100, 1),
        sent("m3", "g0", "grad", 10, 1),
        sent("m3", "g0", "hidden", 500, 5),
    )
    peers = (received("m3", "g0", "hidden", 599, 6), received("m3", "g1", "x", 9, 1))
    assert compare(ours, peers) == [
        "job m3, stream g0, grad sent: 10 bytes in 1 frames here, 0 bytes in 0 frames"
        " there",
        "job m3, stream g0, hidden sent: 600 bytes in 6 frames here, 599 bytes in 6"
        " frames there",
        "job m3, stream g1, x sent: 0 bytes in 0 frames here, 9 bytes in 1 frames"
        " there",
    ]
    both = compare(ours[:1], ours[:1])  # both have sent, and nobody received
    assert ["hidden received" in each for each in both] == [True, False]
    assert compare([sent("m", "g", "x", 9, 1)], [received("m", "g", "x", 9, 2)])


def test_entries_of_other_kinds_and_lines_are_left_out():
    what = sent("m3", "g0", "x", 1, 1)
    assert compare([what], [], kind="job") == []
    ours = [{**what, "peer": "lab-t"}, {**what, "peer": "lab-u"}]
    assert compare(ours, [received("m3", "g0", "x", 1, 1, peer="lab-s")]) == []


@pytest.mark.parametrize("field", [*STREAM, "bytes", "frames"])
def test_entries_that_count_nothing_are_differences(field):
    good = sent("m3", "g0", "x", 1, 1)
    for value in (None, [], {}, -1, 1.5, True):
        assert compare([good | {field: value}], [received("m3", "g0", "x", 1, 1)])


def test_names_of_others_are_printable():
    (found,) = compare([sent("\x1b[2J", "\n", "\u202e", 1, 1)], [])
    assert found.isprintable()


def test_two_folders(tmp_path):
    with opened(tmp_path / "s", "lab-s") as ours, opened(tmp_path / "t", "lab-t") as t:
        for log, peer in itertools.product((ours, t), ("lab-s", "lab-t", "lab-u")):
            count = sent if log is ours else received
            what = count("m3", "g0", "hidden", 5 + (peer == "lab-u"), 1, peer=peer)
            log.append("stream", "switch", **what)
    assert audit_counts.reconcile(tmp_path / "s", tmp_path / "t") == []
    with opened(tmp_path / "t", "lab-t") as log:
        log.append("stream", "switch", **received("m3", "g0", "hidden", 1, 1))
    (found,) = audit_counts.reconcile(tmp_path / "s", tmp_path / "t")
    assert "5 bytes in 1 frames here, 6 bytes in 2 frames there" in found
    (tmp_path / "t" / "verifier").write_text("junk")
    with pytest.raises(audit.AuditError, match="is no public key"):
        audit_counts.reconcile(tmp_path / "s", tmp_path / "t")
    (tmp_path / "t" / "verifier").unlink()
    with pytest.raises(audit.AuditError, match="No such file"):
        audit_counts.reconcile(tmp_path / "s", tmp_path / "t")
