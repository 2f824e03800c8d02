"""The log in the words that a person reads."""

import pytest
from audit_logs import Clock, exchange, opened

from nebula_jax.security import audit
from nebula_jax.security.audit import log as audit_log
from nebula_jax.security.audit import readable, witness
from nebula_jax.security.audit import verify as audit_verify

DIGEST = "0123456789abcdef" * 4


def test_a_line_of_each_kind(tmp_path):
    with opened(tmp_path) as log:
        for kind, who, what in (
            ("federation", "ana", {"event": "began", "lab": "lab-s"}),
            ("federation", "lab-t", {"event": "joined", "name": "f1"}),
            ("certificate", "lab-s", {"lab": "lab-t", "serial": "4711"}),
            ("account.add", "ana", {"name": "bob", "role": "researcher"}),
            (
                *("account.suspend", "ana"),
                {"name": "bob", "before": "active", "after": "suspended"},
            ),
            (
                *("grant.give", "ana"),
                {
                    "number": 1,
                    "nbytes": None,
                    "subject": "bob@lab-t",
                    "handle": "corpus-es",
                    "rows": 1_000_000,
                    "until": "2027-01-01",
                },
            ),
            (
                *("data", "bob@lab-t"),
                {"rows": 4096, "handle": "corpus-es", "job": "m3"},
            ),
            (
                *("job", "ana"),
                {"job": "m3", "commit": DIGEST, "event": "began", "config": DIGEST},
            ),
            ("session", "lab-s", {"peer": "lab-t", "job": "m3"}),
            (
                *("stream", "switch"),
                {
                    "bytes": 786_432,
                    "frames": 3000,
                    "kind": "hidden_grad",
                    "job": "m3",
                    "stream": "generator-0",
                    "peer": "lab-t",
                    "direction": "sent",
                },
            ),
            ("checkpoint", "generator:0", {"job": "m3", "step": 400}),
            ("refusal", "192.0.2.1", {"reason": "revoked"}),
            ("fault", "lab-s", {"event": "unreachable", "peer": "lab-t"}),
            ("audit", "ana", {"event": "verified", "findings": 0}),
            ("audit", "ana", {}),
            ("login.refused", "bob", {}),
            ("odd", "", {"x": {"y": None}, "z": None}),
            ("odd.kind", "lab-s", {}),
            ("switch", "lab-s", {"event": "started"}),
            ("certificate", "lab-t", {"event": "listed", "number": 7}),
            ("session", "lab-s", {"event": "closed", "lab": "lab-t", "sent": 5000}),
        ):
            log.append(kind, who, **what)
    assert list(readable.lines(tmp_path)) == [
        "2026-11-22 14:03:11  ana began lab lab-s",
        "2026-11-22 14:03:12  lab-t joined federation f1",
        "2026-11-22 14:03:13  lab-s issued the certificate of lab-t number 4711",
        "2026-11-22 14:03:14  ana added account bob as researcher",
        "2026-11-22 14:03:15  ana suspended account bob from active to suspended",
        "2026-11-22 14:03:16  ana gave grant 1 to bob@lab-t on corpus-es up"
        " to 1,000,000 rows until 2027-01-01",
        "2026-11-22 14:03:17  bob@lab-t used data corpus-es with 4,096 rows in job m3",
        "2026-11-22 14:03:18  ana began job m3 at commit 0123456789ab"
        " (config 0123456789ab)",
        "2026-11-22 14:03:19  lab-s opened a session with lab-t for job m3",
        "2026-11-22 14:03:20  switch carried 786.4 kB in 3,000 frames of hidden_grad"
        " for job m3 on stream generator-0 (sent) with lab-t",
        "2026-11-22 14:03:21  generator:0 saved a checkpoint of job m3 at step 400",
        "2026-11-22 14:03:22  192.0.2.1 was refused because of revoked",
        "2026-11-22 14:03:23  lab-s met a fault: unreachable with lab-t",
        "2026-11-22 14:03:24  ana verified (findings 0)",
        "2026-11-22 14:03:25  ana noted",
        "2026-11-22 14:03:26  bob was refused a login",
        '2026-11-22 14:03:27  somebody noted odd (x {"y": null})',
        "2026-11-22 14:03:28  lab-s noted odd kind",
        "2026-11-22 14:03:29  lab-s noted switch started",
        "2026-11-22 14:03:30  lab-t listed revocation list 7",
        "2026-11-22 14:03:31  lab-s closed a session with lab-t after sending 5.0 kB",
    ]


def test_what_the_log_notes_about_itself(tmp_path):
    with opened(tmp_path / "s") as log:
        exchange(log, witness.Witness(tmp_path / "t", "lab-t"))
        (tmp_path / "t" / "peers" / "lab-s.json").unlink()
        exchange(log, witness.Witness(tmp_path / "t", "lab-t"))
        log.sign_head()
        with audit.paths(tmp_path / "s").log.open("ab") as stream:
            stream.write(b"half a line")
        log.append("job", "ana")
    first, second, third, _ = (line[21:] for line in readable.lines(tmp_path / "s"))
    assert first == "lab-t cosigns lab-s's log from here on"
    assert (
        second == "lab-t cosigns lab-s's log with a new key: what it had seen is lost"
    )
    assert third.startswith(
        "lab-s cut 11 bytes off where entry 2 was half-written by a"
    )
    assert "kept as cut.2." in third


def test_texts_of_others_stay_in_their_line(tmp_path):
    bad = "x\n2026-11-22 14:03:11  eve granted all\x1b[2J\u202e\ud800"
    with opened(tmp_path) as log:
        for kind in (*readable.MESSAGES, "other"):
            log.append(
                kind, bad, **{"event": bad, "job": bad, "bytes": bad, bad: [bad]}
            )
            log.append(kind, "ana", event=3, job={"a": bad}, until=None)
            log.append(kind, "ana", event="witness", lab=[bad], former=bad)
            log.append(kind, "ana", event="recovered", entry=bad, bytes=bad, kept=[bad])
    found = list(readable.lines(tmp_path))
    assert len(found) == 4 * (len(readable.MESSAGES) + 1)
    assert all(line.isprintable() and len(line) <= 4000 for line in found)
    assert all("x\ufffd2026" in line for line in found[::4])


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


def test_entries_of_one_kind(tmp_path):
    with opened(tmp_path) as log:
        for kind in ("account.add", "accounts", "account", "job"):
            log.append(kind, "ana")
        log._write(b"junk")
    found = [line[21:] for line in readable.lines(tmp_path, "account")]
    assert found == ["ana added", "ana changed"]


def test_a_missing_log(tmp_path):
    with pytest.raises(audit.AuditError, match="No such file"):
        list(readable.lines(tmp_path))
