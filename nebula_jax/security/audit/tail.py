"""The end of an audit log after a crash: what of it is whole.

An entry is a line and its hash, written one after the other and not at once. A process
that is killed leaves a part of a line, or a line without its hash; a power cut may take
any part of what was not synced. All that comes after the last whole entry is cut off.
What a signed checkpoint covers was synced before: if that is not whole, somebody or a
bad disk changed it, and nothing is repaired.
"""

from typing import NamedTuple

from nebula_jax.security.audit import entries as audit_entries
from nebula_jax.security.audit import files as audit_files
from nebula_jax.security.audit import merkle


class Tail(NamedTuple):
    """The new bytes of log.jsonl and leaves.bin, taken apart."""

    lines: list[bytes]
    """Those that are entries, without their ends."""
    hashes: list[bytes]
    """Those of these lines."""
    whole: int
    """The number of these lines whose hash was there; the rest had none yet."""
    cut: bytes
    """Bytes of log.jsonl after them, which are no entries."""
    stray: int
    """Bytes of leaves.bin after the hashes of whole entries."""

    @property
    def is_whole(self) -> bool:
        """True if there is nothing to repair."""
        return self.whole == len(self.lines) and not self.cut and not self.stray


def read(data: bytes, hashes: bytes, begin: int) -> Tail:
    """Takes the new bytes of a log apart.

    Args:
      data: of log.jsonl, from the beginning of a line.
      hashes: of leaves.bin, from the same entry on.
      begin: the index of that entry.
    """
    *lines, _ = data.split(b"\n")
    found: list[bytes] = []
    whole = position = 0
    for line in lines:
        hashed = merkle.leaf(line)
        there = hashes[merkle.SIZE * whole : merkle.SIZE * (whole + 1)]
        if there == hashed:
            whole += 1
        elif len(there) == merkle.SIZE or not _is_entry(begin + len(found), line):
            break
        found.append(hashed)
        position += len(line) + 1
    stray = len(hashes) - merkle.SIZE * whole
    return Tail(lines[: len(found)], found, whole, data[position:], stray)


def _is_entry(index: int, line: bytes) -> bool:
    try:
        audit_entries.decode(index, line)
    except audit_files.AuditError:
        return False
    return True
