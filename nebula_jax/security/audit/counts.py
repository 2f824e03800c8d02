"""The byte counts of two labs' audit logs, compared.

Both switches of a line count what crosses it and append the counts as entries of kind
`stream`, each with what was added since the entry before:

    log.append("stream", "switch", job="m3", stream="4f1d", kind="hidden_grad",
               direction="sent", bytes=786432, frames=3, peer="lab-t")

What one side has sent of a job, stream and kind, the other has received, however each
has cut it into entries. `peer` is the lab at the other end; entries of other lines are
left out.
"""

import pathlib
from collections.abc import Iterable
from typing import Any, NamedTuple

from nebula_jax import printable
from nebula_jax.security.audit import AuditError, checkpoint_note
from nebula_jax.security.audit import entries as audit_entries

_TURNED = {"sent": "received", "received": "sent"}


class Stream(NamedTuple):
    """The name under which both sides count."""

    job: str
    stream: str
    kind: str
    direction: str
    """`sent` or `received`, as this lab sees it."""


class Count(NamedTuple):
    """The sum of what has crossed of a stream."""

    bytes: int = 0
    frames: int = 0

    def __str__(self) -> str:
        return f"{self.bytes:,} bytes in {self.frames:,} frames"


class Difference(NamedTuple):
    """A stream of which two labs have counted different sums."""

    stream: Stream
    ours: Count
    peers: Count

    def __str__(self) -> str:
        job, stream, kind, direction = (printable.line(each) for each in self.stream)
        return (
            f"job {job}, stream {stream}, {kind} {direction}: {self.ours} here,"
            f" {self.peers} there"
        )


def reconcile(ours: pathlib.Path, peers: pathlib.Path) -> list[Difference]:
    """Compares the counts in two folders.

    Args:
      ours: `audit` of this lab.
      peers: `audit` of the other lab, or a copy.

    Returns:
      The differences, by the names of streams; [] if all counts agree.

    Raises:
      AuditError: if a log cannot be read, or an entry of kind `stream` counts nothing.
    """
    lab, peer = (
        checkpoint_note.lab_of(checkpoint_note.verifier_of(folder).name)
        for folder in (ours, peers)
    )
    return compare(audit_entries.read(ours), audit_entries.read(peers), lab, peer)


def compare(
    ours: Iterable[audit_entries.Entry],
    peers: Iterable[audit_entries.Entry],
    lab: str,
    peer: str,
) -> list[Difference]:
    """Compares the entries of two labs, `lab` and `peer`; see `reconcile`."""
    here, there = _counts(ours, peer, "our"), _counts(peers, lab, "the peer's")
    there = {
        stream._replace(direction=_TURNED.get(stream.direction, stream.direction)): sums
        for stream, sums in there.items()
    }
    both = ((each, here.get(each), there.get(each)) for each in here.keys() | there)
    return sorted(
        Difference(stream, a or Count(), b or Count())
        for stream, a, b in both
        if (a or Count()) != (b or Count())
    )


def _counts(
    entries: Iterable[audit_entries.Entry], other: str, whose: str
) -> dict[Stream, Count]:
    """Returns the sum of each stream.

    Args:
      entries: of a log.
      other: the lab at the other end of the line.
      whose: log this is, for the error.
    """
    found: dict[Stream, Count] = {}
    for entry in entries:
        what = entry.what
        if entry.kind != "stream" or what.get("peer", other) != other:
            continue
        names: list[Any] = [what.get(each) for each in Stream._fields]
        counts: list[Any] = [what.get(each) for each in Count._fields]
        if not all(isinstance(each, str) for each in names) or not all(
            type(each) is int and each >= 0 for each in counts
        ):
            raise AuditError(
                f"entry {entry.number} of {whose} log counts no stream: it needs"
                f" {', '.join(Stream._fields)} as texts, bytes and frames as numbers"
            )
        before = found.get(Stream(*names), Count())
        sums = Count(before.bytes + counts[0], before.frames + counts[1])
        found[Stream(*names)] = sums
    return found
