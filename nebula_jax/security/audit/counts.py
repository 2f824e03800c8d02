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
from collections.abc import Iterable, Mapping
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
    entry: int | None
    """The index of the first entry of ours that nothing of the peer's matches."""
    peers_entry: int | None
    """That of the peer's log."""

    def __str__(self) -> str:
        job, stream, kind, direction = (printable.line(each) for each in self.stream)
        where = [
            f"entry {index} of {whose} log"
            for index, whose in ((self.entry, "our"), (self.peers_entry, "the peer's"))
            if index is not None
        ]
        return (
            f"job {job}, stream {stream}, {kind} {direction}: {self.ours} here,"
            f" {self.peers} there; they part at {' and '.join(where)}"
        )


def reconcile(ours: pathlib.Path, peers: pathlib.Path) -> list[Difference]:
    """Compares the counts in two folders.

    Args:
      ours: `audit` of this lab.
      peers: `audit` of the other lab, or a copy.

    Returns:
      The differences, the earliest in our log first; [] if all counts agree.

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
    differences = []
    for stream in here.keys() | there.keys():
        a, b = here.get(stream, {}), there.get(stream, {})
        end, peers_end = max(a, default=Count()), max(b, default=Count())
        if end != peers_end:
            parted = _part(a, b), _part(b, a)
            differences.append(Difference(stream, end, peers_end, *parted))
    return sorted(
        differences,
        key=lambda each: (each.entry is None, each.entry, each.peers_entry),
    )


def _part(sums: Mapping[Count, int], others: Mapping[Count, int]) -> int | None:
    """Returns the first entry after which the other side never had the same sum."""
    return next((entry for sum_, entry in sums.items() if sum_ not in others), None)


def _counts(
    entries: Iterable[audit_entries.Entry], other: str, whose: str
) -> dict[Stream, dict[Count, int]]:
    """Returns stream -> sum so far -> the first entry after which it was so much.

    Args:
      entries: of a log.
      other: the lab at the other end of the line.
      whose: log this is, for the error.
    """
    found: dict[Stream, dict[Count, int]] = {}
    ends: dict[Stream, Count] = {}
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
        stream = Stream(*names)
        before = ends.get(stream, Count())
        ends[stream] = Count(before.bytes + counts[0], before.frames + counts[1])
        found.setdefault(stream, {}).setdefault(ends[stream], entry.number)
    return found
