"""Verification of an audit log, offline, of the lab's own folder or of a copy.

    for wrong in audit_verify.verify(folder):
        print(wrong)      # log.jsonl: entry 13 (line 14) does not follow entry 12 ...

The signed heads are what counts; they cover the entries. Each entry has the root of all
before it, which shows where one was altered. If all that follow were changed alike, it
lies between the last head that still holds and the first that does not.

Whoever has the lab's key could have signed all of it anew: then the heads that peers
have seen (`seen`) do not hold, as they do not for a copy that was rolled back. What was
appended since the last head, nothing protects.
"""

import contextlib
import itertools
import os
import pathlib
import time
from collections.abc import Collection, Sequence
from typing import BinaryIO, NamedTuple

from nebula_jax.security import audit
from nebula_jax.security.audit import entries as audit_entries
from nebula_jax.security.audit import signed_heads
from nebula_jax.security.audit.signed_heads import SignedHead, Verifier

LINE_SECONDS = 0.1  # for a line that is being written


class Copy(NamedTuple):
    """The files of an audit log; the one that grows is read line by line."""

    log: BinaryIO
    head: bytes
    cosigned: bytes


class _Entries(NamedTuple):
    """The entries of a log, as far as they are compared."""

    size: int
    roots: dict[int, str]  # size that was asked for -> the root of so many entries
    unlinked: int | None  # the first index whose line does not follow the one before
    unreadable: int | None  # the first whose line is not written as an entry is
    has_end: bool


def verify(
    folder: pathlib.Path,
    seen: Sequence[tuple[str, SignedHead]] = (),
    verifier: Verifier | None = None,
) -> list[str]:
    """Verifies the audit log in a folder: `audit` of a lab, or a copy of its files.

    `seen` are labs with the head of this log that each keeps (`witness.Seen.head`):
    without them a copy that was rolled back as a whole, or signed anew, or is not what
    the lab shows to another, cannot be found. `verifier` is the public key of the log
    as the reader has it from elsewhere; None for the one in the folder, which whoever
    changed the copy could have changed too. Returns what is wrong, a sentence each, the
    first bad entry first; [] if nothing is. Raises AuditError if a file cannot be read.
    """
    beside = None
    with contextlib.suppress(audit.AuditError):
        beside = signed_heads.verifier_of(folder)
    wrong = []
    if beside is None or (verifier or beside) != beside:
        wrong.append("verifier is missing, or not the public key of this log")
    if who := verifier or beside:
        with audit.disk_errors(folder), contextlib.ExitStack() as stack:
            copy = _opened(audit.paths(folder), stack)
            wrong = examine(copy, who, seen) + wrong
    return wrong


def examine(
    copy: Copy, who: Verifier, seen: Sequence[tuple[str, SignedHead]] = ()
) -> list[str]:
    """Verifies the files of an audit log, which may have any bytes; see `verify`.

    Returns what is wrong, the first bad entry first. `who` is the log's public key.
    """
    signed, wrong = _own_heads(copy.head, who, seen)
    try:
        kept = signed_heads.read_cosigned(copy.cosigned)
    except signed_heads.HeadError:
        wrong.append("cosigned is not as it was written")
        kept = {}
    signed += [
        (head, f"the head that {peer} has cosigned")
        for peer, (head, _) in kept.items()
        if signed_heads.is_signed(head, who)
    ]
    signed.sort(key=lambda each: each[0].size)
    for (one, its), (other, others) in itertools.pairwise(signed):
        if one.size == other.size and one.root != other.root:
            wrong.append(
                f"head: {its} and {others} have two roots of {one.size} entries, both"
                " signed: the lab keeps two logs of one name"
            )
    found = _read(copy.log, {head.size for head, _ in signed})
    for peer, (head, by) in kept.items():
        if not (
            signed_heads.is_signed(head, who) and signed_heads.is_cosigned(head, by)
        ):
            wrong.append(f"cosigned has a signature of {peer} that does not hold")
    bad = _compare(found, signed)
    if not found.has_end:
        bad.append(f"log.jsonl: {_named(found.size)} has no end of line")
    if not bad + wrong and found.unlinked is not None:
        bad.append(_unlinked(found.unlinked))
    if not bad + wrong and found.unreadable is not None:
        bad.append(
            f"log.jsonl: {_named(found.unreadable)} is not written as an entry is"
        )
    return bad + wrong


def _own_heads(
    newest: bytes, who: Verifier, seen: Sequence[tuple[str, SignedHead]]
) -> tuple[list[tuple[SignedHead, str]], list[str]]:
    """Returns the heads that its key has signed, with their names, and what is wrong.

    Those that peers have cosigned are not among them.
    """
    signed, wrong = [], []
    head = None
    with contextlib.suppress(signed_heads.HeadError):
        head = signed_heads.read(newest.decode("ascii", "replace").removesuffix("\n"))
    if (
        head is None
        or not newest.endswith(b"\n")
        or not signed_heads.is_signed(head, who)
    ):
        head = None
        wrong.append("head is missing, or not signed with the key of this log")
    else:
        signed.append((head, "the newest head"))
    for peer, each in seen:
        if not signed_heads.is_signed(each, who):
            text = f"head is signed with another key than what {peer} has seen of it"
            wrong.append(text)
            continue
        name = f"the head that {peer} has seen"
        signed.append((each, name))
        if head is not None and head.size < each.size:
            text = f"head is older than {name}, of {each.size} entries"
            wrong.append(f"{text}: it was rolled back")
    return signed, wrong


def _read(log: BinaryIO, sizes: Collection[int]) -> _Entries:
    """Reads the entries once, keeping none; `sizes` are those whose roots to find."""
    size, root = 0, signed_heads.EMPTY
    roots = {0: root.hex()}
    unlinked = unreadable = None
    while line := log.readline(audit_entries.MOST_BYTES + 2):
        if line[-1:] != b"\n":  # a switch may be writing it
            time.sleep(LINE_SECONDS)
            line += log.readline(audit_entries.MOST_BYTES + 2)
        if line[-1:] != b"\n":
            break
        if unlinked is None and not audit_entries.is_after(line, root):
            unlinked = size
        entry = line[:-1]
        if unreadable is None and not audit_entries.is_entry(entry):
            unreadable = size
        root = signed_heads.chained(root, [signed_heads.leaf(entry)])
        size += 1
        if size in sizes:
            roots[size] = root.hex()
    return _Entries(size, roots, unlinked, unreadable, not line)


def _compare(found: _Entries, signed: Sequence[tuple[SignedHead, str]]) -> list[str]:
    """Compares the entries with signed heads, in the order of their sizes."""
    good = 0  # so many entries are right
    for head, name in signed:
        if found.roots.get(head.size) == head.root:
            good = head.size
            continue
        here, covered = min(head.size, found.size), head.size
        if found.unlinked is not None and found.unlinked < here:
            return [_unlinked(found.unlinked)]
        if found.size < covered:
            return [
                f"log.jsonl: {_named(found.size, covered - 1)} missing: {name} covers"
                f" {covered}, and {found.size} are here"
            ]
        return [
            f"log.jsonl: {_named(good, covered - 1)} not as {name} covers it: the last"
            " was altered, or one and all that follow"
        ]
    return []


def _unlinked(index: int) -> str:
    if index == 0:
        return f"log.jsonl: {_named(0)} does not begin the log"
    return (
        f"log.jsonl: {_named(index)} does not follow entry {index - 1}: one of both was"
        " altered, or what was between them is missing"
    )


def _named(first: int, last: int | None = None) -> str:
    """Returns the name of an entry; given the last of several, also the verb."""
    if last is None:
        return f"entry {first} (line {first + 1})"
    if last <= first:
        return f"{_named(first)} is"
    return f"entries {first} to {last} (lines {first + 1} to {last + 1}) are"


def _opened(paths: audit.Paths, stack: contextlib.ExitStack) -> Copy:
    """Opens the files until the stack ends; missing ones are empty.

    A switch appends meanwhile: the log, read last, has all that the others cover.
    """

    def opened(path: pathlib.Path) -> BinaryIO:
        found = path if path.exists() else pathlib.Path(os.devnull)
        return stack.enter_context(found.open("rb"))

    cosigned, head = opened(paths.cosigned).read(), opened(paths.head).read()
    return Copy(opened(paths.log), head, cosigned)
