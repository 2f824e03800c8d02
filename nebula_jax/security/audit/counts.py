"""The byte counts of two labs' audit logs, compared.

Both switches of a line count what crosses it and append the counts as entries of kind
`stream`, each with what was added since the entry before:

    log.append("stream", "switch", job="m3", stream="4f1d", kind="hidden_grad",
               direction="sent", bytes=786432, frames=3, peer="lab-t")

What one side has sent of a job, stream and kind, the other has received, however each
has cut it into entries. (Entries without a direction are compared with such.) `peer` is
the lab at the other end; entries of other lines are left out.
"""

import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from nebula_jax import printable
from nebula_jax.security.audit import checkpoint_note
from nebula_jax.security.audit import entries as audit_entries
from nebula_jax.security.audit import files as audit_files


class Count(NamedTuple):
    """A sum of what crossed."""

    bytes: int
    frames: int

    def __str__(self) -> str:
        return f"{self.bytes:,} bytes in {self.frames:,} frames"


class Stream(NamedTuple):
    """The name under which both sides count."""

    job: str
    stream: str
    kind: str
    direction: str
    """`sent` or `received`, as this lab sees it; or ""."""


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
        kind = f"{kind} {direction}".rstrip()
        where = [
            f"entry {index} of {whose} log"
            for index, whose in ((self.entry, "our"), (self.peers_entry, "the peer's"))
            if index is not None
        ]
        return (
            f"job {job}, stream {stream}, {kind}: {self.ours} here, {self.peers} there;"
            f" they part at {' and '.join(where)}"
        )


class _Sums(NamedTuple):
    """The sums of one stream after each entry about it."""

    after: list[Count]
    entries: list[int]


def reconcile(ours: pathlib.Path, peers: pathlib.Path) -> list[Difference]:
    """Compares the counts in two folders.

    Args:
      ours: `audit` of this lab.
      peers: `audit` of the other lab, or a copy.

    Returns:
      The differences, the earliest in our log first; [] if all counts agree.

    Raises:
      audit_files.AuditError: if a log cannot be read; see `compare`.
    """
    return compare(
        audit_entries.read(ours), audit_entries.read(peers), _lab(ours), _lab(peers)
    )


def compare(
    ours: Iterable[audit_entries.Entry],
    peers: Iterable[audit_entries.Entry],
    lab: str = "",
    peer: str = "",
) -> list[Difference]:
    """Compares the counts in two logs.

    Args:
      ours: the entries of this lab.
      peers: the entries of the other one.
      lab: name of this lab; "" to count the peer's entries of every line.
      peer: name of the other one; "" to count ours of every line.

    Returns:
      See `reconcile`.

    Raises:
      audit_files.AuditError: if an entry of kind `stream` is not as it has to be.
    """
    here = _sums(ours, peer, "our", {})
    there = _sums(peers, lab, "the peer's", {"sent": "received", "received": "sent"})
    nothing = _Sums([], [])
    differences = []
    for stream in here.keys() | there.keys():
        a, b = here.get(stream, nothing), there.get(stream, nothing)
        if _last(a) != _last(b):
            differences.append(
                Difference(stream, _last(a), _last(b), _parting(a, b), _parting(b, a))
            )
    return sorted(differences, key=_place)


def _place(difference: Difference) -> tuple[bool, int, int, Stream]:
    entry, peers_entry = difference.entry, difference.peers_entry
    return entry is None, entry or 0, peers_entry or 0, difference.stream


def _last(sums: _Sums) -> Count:
    return sums.after[-1] if sums.after else Count(0, 0)


def _parting(sums: _Sums, others: _Sums) -> int | None:
    """Returns the first entry after which the other side never had the same sum."""
    there = set(others.after)
    for after, entry in zip(*sums, strict=True):
        if after not in there:
            return entry
    return None


def _sums(
    entries: Iterable[audit_entries.Entry],
    other: str,
    whose: str,
    turned: Mapping[str, str],
) -> dict[Stream, _Sums]:
    """Adds the counts of a log up.

    Args:
      entries: of the log.
      other: the lab at the other end; "" for all.
      whose: log this is, for the error.
      turned: direction -> the one as this lab sees it.
    """
    found: dict[Stream, _Sums] = {}
    for entry in entries:
        what = entry.what
        if entry.kind != "stream" or (other and what.get("peer", other) != other):
            continue
        direction = what.get("direction", "")
        names = [what.get("job"), what.get("stream"), what.get("kind"), direction]
        counts = [what.get(each) for each in Count._fields]
        if not all(isinstance(each, str) for each in names) or not all(
            type(each) is int and each >= 0 for each in counts
        ):
            raise audit_files.AuditError(
                f"entry {entry.number} of {whose} log counts no stream: it needs job,"
                " stream and kind as texts, bytes and frames as numbers"
            )
        sums = found.setdefault(_stream(names, turned), _Sums([], []))
        before = _last(sums)
        number_of_bytes, number_of_frames = (int(each or 0) for each in counts)
        sums.after.append(
            Count(before.bytes + number_of_bytes, before.frames + number_of_frames)
        )
        sums.entries.append(entry.number)
    return found


def _stream(names: Sequence[object], turned: Mapping[str, str]) -> Stream:
    job, stream, kind, direction = map(str, names)
    return Stream(job, stream, kind, turned.get(direction, direction))


def _lab(folder: pathlib.Path) -> str:
    """Returns the name of the lab whose folder this is, by its public key."""
    path = audit_files.paths(folder).verifier
    with audit_files.disk_errors(path):
        data = path.read_bytes()
    try:
        text = data.decode().removesuffix("\n")
        return checkpoint_note.lab_of(checkpoint_note.read_verifier(text).name)
    except (UnicodeDecodeError, checkpoint_note.NoteError):
        raise audit_files.AuditError(f"{path}: is no public key of a log") from None
