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
from typing import Any

from nebula_jax import printable
from nebula_jax.security.audit import entries as audit_entries
from nebula_jax.security.audit import signed_heads

_TURNED = {"sent": "received", "received": "sent"}
_NAMES, _COUNTS = ("job", "stream", "kind", "direction"), ("bytes", "frames")

Counts = dict[tuple[str, ...], tuple[int, int]]
"""Job, stream, kind and direction -> bytes and frames in all."""


def reconcile(ours: pathlib.Path, peers: pathlib.Path) -> list[str]:
    """Compares the counts in the folders `audit` of two labs, or copies of them.

    Returns the differences, a sentence each, by the names of streams; [] if all agree.
    Raises AuditError if a log cannot be read.
    """
    lab, peer = (signed_heads.verifier_of(folder).lab for folder in (ours, peers))
    return compare(audit_entries.read(ours), audit_entries.read(peers), lab, peer)


def compare(
    ours: Iterable[audit_entries.Entry],
    peers: Iterable[audit_entries.Entry],
    lab: str,
    peer: str,
) -> list[str]:
    """Compares the entries of two labs, `lab` and `peer`; see `reconcile`."""
    here, there = _counts(ours, peer), _counts(peers, lab)
    there = {(*n, _TURNED.get(d, d)): sums for (*n, d), sums in there.items()}
    found = []
    for names in sorted(here.keys() | there):
        a, b = here.get(names, (0, 0)), there.get(names, (0, 0))
        if a != b:
            job, stream, kind, direction = map(printable.line, names)
            found.append(
                f"job {job}, stream {stream}, {kind} {direction}: {a[0]:,} bytes in"
                f" {a[1]:,} frames here, {b[0]:,} bytes in {b[1]:,} frames there"
            )
    return found


def _counts(entries: Iterable[audit_entries.Entry], other: str) -> Counts:
    """Returns the sums of the line to a lab; what is no number counts nothing."""
    found: Counts = {}
    for entry in entries:
        what = entry.what
        if entry.kind != "stream" or what.get("peer", other) != other:
            continue
        names = tuple(str(what.get(each)) for each in _NAMES)
        counts: list[Any] = [what.get(each) for each in _COUNTS]
        more = [each if type(each) is int and each > 0 else 0 for each in counts]
        nbytes, frames = found.get(names, (0, 0))
        found[names] = nbytes + more[0], frames + more[1]
    return found
