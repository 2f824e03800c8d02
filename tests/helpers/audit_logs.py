"""Audit logs for tests: those of lab-s, which lab-t witnesses."""

import datetime

from nebula_jax.security import audit
from nebula_jax.security.audit import checkpoint_note
from nebula_jax.security.audit import entries as audit_entries
from nebula_jax.security.audit import log as audit_log
from nebula_jax.security.audit import verify as audit_verify


class Clock:
    """A clock that moves on by a second whenever somebody looks at it."""

    def __init__(self, step=1.0):
        self.now = datetime.datetime(2026, 11, 22, 14, 3, 10, tzinfo=datetime.UTC)
        self.step = datetime.timedelta(seconds=step)

    def __call__(self):
        self.now += self.step
        return self.now


def opened(folder, lab="lab-s"):
    return audit_log.Log(folder, lab, Clock())


def fill(log, count, begin=0):
    """Appends entries of the kinds that a run has."""
    for number in range(begin, begin + count):
        if number % 7 == 0:
            log.append("job", "ana", event="began", job=f"m{number}", seed=number)
        else:
            log.append(
                "stream",
                "switch",
                job=f"m{number // 7 * 7}",
                stream="generator-0",
                kind="hidden",
                bytes=1000 * number,
                frames=number,
            )


def exchange(log, witness):
    """Has lab-t cosign what lab-s has; returns its answer."""
    text = log.sign_head()
    size = checkpoint_note.read(text).checkpoint.size
    proof = log.consistency(witness.size("lab-s"), size)
    answer = witness.cosign("lab-s", text, proof, log.verifier, seconds=1_800_000_000)
    assert log.add_cosignature("lab-t", text, answer.line, answer.verifier)
    return answer


def size(folder):
    """Returns the number of a log's entries."""
    return sum(1 for _ in audit_entries.lines(folder))


def copied(folder):
    """Returns the bytes of a folder's files."""
    return audit_verify.Copy._make(
        path.read_bytes() for path in audit.paths(folder)[:4]
    )
