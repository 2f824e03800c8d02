"""The log as a person reads it."""

import pytest
from audit_logs import Clock, opened

from nebula_jax.security import audit
from nebula_jax.security.audit import log as audit_log
from nebula_jax.security.audit import readable
from nebula_jax.security.audit import verify as audit_verify


@pytest.mark.parametrize(
    ("kind", "who", "what", "line"),
    [
        (
            *("account.suspend", "ana"),
            {"name": "bob", "before": "active", "after": "suspended"},
            "ana: account suspend (after suspended, before active, name bob)",
        ),
        (
            *("grant.give", "ana"),
            {"number": 1, "nbytes": None, "subject": "bob@lab-t", "rows": 1_000_000},
            "ana: grant give (number 1, rows 1000000, subject bob@lab-t)",
        ),
        (
            *("job", "ana"),
            {"job": "m3", "commit": "0123", "event": "began", "clusters": ["a", "b"]},
            'ana: job began (clusters ["a", "b"], commit 0123, job m3)',
        ),
        (
            *("stream", "ana@lab-s"),
            {"bytes": 786_432, "frames": 3000, "kind": "tokens", "peer": "lab-t"},
            "ana@lab-s: stream (bytes 786432, frames 3000, kind tokens, peer lab-t)",
        ),
        ("odd", "", {"x": {"y": None}, "z": None}, 'somebody: odd (x {"y": null})'),
        ("odd", "ana", {}, "ana: odd"),
    ],
)
def test_an_entry_is_a_line_with_its_time(tmp_path, kind, who, what, line):
    with opened(tmp_path) as log:
        log.append(kind, who, **what)
    (found,) = readable.lines(tmp_path)
    assert found == f"2026-11-22 14:03:11  {line}"


def test_texts_of_others_stay_in_their_line(tmp_path):
    bad = "x\n2026-11-22 14:03:11  eve granted all\x1b[2J\u202e\ud800"
    with opened(tmp_path) as log:
        for kind in ("job", "account.add"):
            log.append(
                kind, bad, **{"event": bad, "job": bad, "bytes": bad, bad: [bad]}
            )
            log.append(kind, "ana", event=3, job={"a": bad}, until=None)
            log.append(kind, "ana", event=bad, lab=[bad], bytes=bad, entry=[bad])
    found = list(readable.lines(tmp_path))
    assert len(found) == 6
    assert all(line.isprintable() and len(line) <= 4000 for line in found)
    assert all("x\ufffd2026" in line for line in found[::3])


def test_a_line_that_cannot_be_read_is_not_the_last(tmp_path):
    with opened(tmp_path) as log:
        log.append("job", "ana")
        log._write(b"\x1b junk")
        log.append("job", "bob")
    first, second, third = readable.lines(tmp_path)
    assert second == f"{'?':19}  entry 1 cannot be read: b'\\x1b junk'"
    assert (first[21:], third[21:]) == ("ana: job", "bob: job")


def test_a_clock_that_was_set_back_is_marked(tmp_path):
    clock = Clock()
    with audit_log.Log(tmp_path, "lab-s", clock) as log:
        for step in (1, 1, -9000, 1):
            clock.step *= 0
            clock.now += type(clock.step)(seconds=step)
            log.append("job", "ana")
        log.sign_head()
    marks = ["set back" in line for line in readable.lines(tmp_path)]
    assert marks == [False, False, True, False]
    assert audit_verify.verify(tmp_path) == []  # the clock changes no order


def test_a_missing_log(tmp_path):
    with pytest.raises(audit.AuditError, match="No such file"):
        list(readable.lines(tmp_path))
