"""Audit logs for tests: those of lab-s, which lab-t witnesses."""

import datetime

from nebula_jax.security import audit
from nebula_jax.security.audit import entries as audit_entries
from nebula_jax.security.audit import log as audit_log
from nebula_jax.security.audit import verify as audit_verify
from nebula_jax.security.audit import witness


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


class Peer:
    """A lab that witnesses: its own log, and what it has seen."""

    def __init__(self, folder, lab="lab-t"):
        self.witness, self.log = witness.Witness(folder), opened(folder, lab)

    def cosign(self, log):
        """Cosigns what lab-s has; returns the head and the answer."""
        head, leaves = log.head_after(self.witness.size("lab-s"))
        self.witness.keep("lab-s", head.text, leaves, log.verifier.text)
        return head, self.log.cosign(head)

    def exchange(self, log):
        """Cosigns what lab-s has, which lab-s keeps; returns the answer."""
        head, answer = self.cosign(log)
        assert log.add_cosignature("lab-t", head.text, answer.text)
        return answer


def size(folder):
    """Returns the number of a log's entries."""
    return sum(1 for _ in audit_entries.lines(folder))


def copied(folder):
    """Returns the bytes of a folder's files."""
    return audit_verify.Copy._make(
        path.read_bytes() for path in audit.paths(folder)[:3]
    )


def write_line(log, line):
    """Appends a line to an open log that no entry has."""
    log._waiting += line + b"\n"
    log._take(line)
