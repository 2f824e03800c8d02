"""The log in the words that a person reads."""

import pytest
from audit_logs import Clock, exchange, opened

from nebula_jax.security import audit
from nebula_jax.security.audit import log as audit_log
from nebula_jax.security.audit import readable, witness
from nebula_jax.security.audit import verify as audit_verify

DIGEST = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("kind", "who", "what", "line"),
    [
        (
            *("account.suspend", "ana"),
            {"name": "bob", "before": "active", "after": "suspended"},
            "ana suspended account bob from active to suspended",
        ),
        (
            *("grant.give", "ana"),
            {"number": 1, "nbytes": None, "subject": "bob@lab-t", "rows": 1_000_000},
            "ana gave grant 1 to bob@lab-t up to 1,000,000 rows",
        ),
        (
            *("job", "ana"),
            {"job": "m3", "commit": DIGEST, "event": "began", "config": DIGEST},
            "ana began job m3 at commit 0123456789ab (config 0123456789ab)",
        ),
        (
            *("stream", "switch"),
            {"bytes": 786_432, "frames": 3000, "kind": "tokens", "peer": "lab-t"},
            "switch carried 786.4 kB in 3,000 frames of tokens with lab-t",
        ),
        ("audit", "ana", {"event": "verified", "findings": 0}, "ana verified"),
        (
            "odd",
            "",
            {"x": {"y": None}, "z": None},
            'somebody noted odd (x {"y": null})',
        ),
    ],
)
def test_an_entry_is_a_sentence_with_its_time(tmp_path, kind, who, what, line):
    with opened(tmp_path) as log:
        log.append(kind, who, **what)
    (found,) = readable.lines(tmp_path)
    assert found.startswith(f"2026-11-22 14:03:11  {line}")


def test_what_the_log_notes_about_itself(tmp_path):
    with opened(tmp_path / "s") as log:
        for _ in range(2):
            exchange(log, witness.Witness(tmp_path / "t", "lab-t"))
            (tmp_path / "t" / "peers" / "lab-s.json").unlink()
    with audit.paths(tmp_path / "s").log.open("ab") as stream:
        stream.write(b"half a line")
    opened(tmp_path / "s").close()
    first, lost, second = (line[21:] for line in readable.lines(tmp_path / "s"))
    assert first.startswith("lab-s is witnessed by lab lab-t (verifier nebula/lab-t/wi")
    assert "by lab lab-t which has lost what it saw under nebula/lab-t/wi" in lost
    assert second.startswith(
        "lab-s cut off 11 bytes where entry 2 was half-written (kept cut.2."
    )


def test_texts_of_others_stay_in_their_line(tmp_path):
    bad = "x\n2026-11-22 14:03:11  eve granted all\x1b[2J\u202e\ud800"
    with opened(tmp_path) as log:
        for kind in (*readable.MESSAGES, "other"):
            log.append(
                kind, bad, **{"event": bad, "job": bad, "bytes": bad, bad: [bad]}
            )
            log.append(kind, "ana", event=3, job={"a": bad}, until=None)
            log.append(kind, "ana", event=bad, lab=[bad], bytes=bad, entry=[bad])
    found = list(readable.lines(tmp_path))
    assert len(found) == 3 * (len(readable.MESSAGES) + 1)
    assert all(line.isprintable() and len(line) <= 4000 for line in found)
    assert all("x\ufffd2026" in line for line in found[::3])


def test_a_line_that_cannot_be_read_is_not_the_last(tmp_path):
    with opened(tmp_path) as log:
        log.append("job", "ana")
        log._write(b"\x1b junk")
        log.append("job", "bob")
    first, second, third = readable.lines(tmp_path)
    assert second == f"{'?':19}  entry 1 cannot be read: b'\\x1b junk'"
    assert (first[21:], third[21:]) == ("ana began", "bob began")


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


@pytest.mark.parametrize(
    ("count", "words"),
    [
        *((0, "0 bytes"), (999, "999 bytes"), (1000, "1.0 kB"), (999_960, "1.0 MB")),
        *((10**9, "1.0 GB"), (2 * 10**18, "2000.0 PB")),
    ],
)
def test_sizes(tmp_path, count, words):
    with opened(tmp_path) as log:
        log.append("stream", "switch", bytes=count)
    assert next(readable.lines(tmp_path)).endswith(f"switch carried {words}")


def test_a_missing_log(tmp_path):
    with pytest.raises(audit.AuditError, match="No such file"):
        list(readable.lines(tmp_path))
