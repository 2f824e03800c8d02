"""The commands about the audit log: audit show, audit verify."""

import argparse
import datetime
import itertools
import json
import pathlib
from collections.abc import Iterator, Mapping

from nebula_jax import printable
from nebula_jax.federation import inner
from nebula_jax.security import audit
from nebula_jax.security.audit import counts as audit_counts
from nebula_jax.security.audit import entries as audit_entries
from nebula_jax.security.audit import signed_heads, witness
from nebula_jax.security.audit import verify as audit_verify
from nebula_jax.security.membership import site_folder
from scripts.federation import arguments

SECONDS = 15.0  # for the switch, which asks others
UNWITNESSED = datetime.timedelta(days=2)
"""So young, entries need no witness: others get them within a day, or with a save."""
AHEAD = datetime.timedelta(hours=1)
"""So much later than now, by the clock of another machine, may an entry be."""
COPY = arguments.file_option(
    "--folder",
    "copy of a folder `audit` to read (default: this lab's own)",
    metavar="COPY",
)


@arguments.command("audit show", COPY)
def show(given: argparse.Namespace) -> int:
    """Shows who did what, a line each, the newest last."""
    for line in shown(_audit(given)):
        print(line)
    return 0


def shown(folder: pathlib.Path) -> Iterator[str]:
    """Yields a line for each entry of a log, which is not verified.

        2026-11-22 14:03:11  ana: job began (commit d484d8e, job m3)

    Times are those of the machine's clock, and order nothing. Values come from people
    and peers; what cannot be printed is replaced.

    Raises:
      audit.AuditError: if the log cannot be read.
    """
    latest = ""
    for index, line in enumerate(audit_entries.lines(folder)):
        try:
            entry = audit_entries.decode(index, line)
        except audit.AuditError:
            yield f"{'?':19}  entry {index} cannot be read: {printable.line(line)}"
            continue
        back = " (the clock was set back)" if entry.time < latest else ""
        latest = entry.time
        text = f"{entry.time[:10]} {entry.time[11:19]}  {_said(entry)}{back}"
        yield printable.line(text, printable.LINE_LIMIT)


def _said(entry: audit_entries.Entry) -> str:
    what = {
        printable.line(name): printable.line(
            each if isinstance(each, str) else json.dumps(each)
        )
        for name, each in entry.what.items()
        if each is not None
    }
    who, kind = printable.line(entry.who) or "somebody", entry.kind.replace(".", " ")
    said = f"{who}: {kind} {what.pop('event', '')}".rstrip()
    values = ", ".join(f"{name} {each}" for name, each in what.items())
    return f"{said} ({values})" if values else said


@arguments.command(
    "audit verify",
    arguments.option(
        "--witnesses",
        type=int,
        default=1,
        metavar="N",
        help="labs that must have witnessed all but the last days (default: 1; 0 for a"
        " lab that is alone)",
    ),
    COPY,
    arguments.file_option(
        "--peer_copy",
        "copy of another lab's log: are the bytes that it counted those that this lab"
        " counted?",
        metavar="FOLDER",
    ),
)
def verify(given: argparse.Namespace) -> int:
    """Verifies the log and asks its witnesses: exit status 1 if anything is wrong."""
    folder = _audit(given)
    seen = _seen(given, folder)
    heads = _heads(given, folder, seen)
    held = [(lab, head) for lab, head in heads.items() if head and head.size]
    findings = audit_verify.verify(folder, held, seen.verifier if seen else None)
    for each in findings:
        print(f"wrong: {each}")
    lacks = False
    if not findings:
        size = sum(1 for _ in audit_entries.lines(folder))
        lab = signed_heads.verifier_of(folder).lab
        print(f"{folder}: {size} entries of {lab}, as they were signed")
        kept = _cosigned(folder) if given.folder is None else {}
        known = {lab: head for lab, head in heads.items() if head or lab not in kept}
        lacks = _witnessed(folder, kept | known) < given.witnesses
    if lacks:
        print(
            f"wrong: fewer than {given.witnesses} (--witnesses) have witnessed all but"
            f" the last {UNWITNESSED.days} days of it: the lab could sign another in"
            " its place"
        )
    if seen:
        lab = seen.verifier.lab
        print(f"held against {seen.head.size} entries of {lab} witnessed here")
    elif given.folder is not None and not held:
        print(
            "held against itself alone: that it was rolled back as a whole, or signed"
            " anew, only a lab that has witnessed it can find"
        )
    differences = _differences(given)
    return 1 if findings or differences or lacks else 0


Heads = Mapping[str, signed_heads.SignedHead | None]


def _heads(
    given: argparse.Namespace, folder: pathlib.Path, seen: witness.Seen | None
) -> Heads:
    """Returns the head that each lab keeps of a log: of the other labs now.

    It is None of a lab that could not be asked, and of size 0 of one that keeps none.
    """
    place, of = arguments.folder(given), _lab_of(folder)
    if not place.audit.is_dir() or not of:
        return {}
    own, heads = place.load().name, dict[str, signed_heads.SignedHead | None]()
    try:
        asked = arguments.request(place, SECONDS, "witnesses", of=of)
        for lab, text in asked["heads"].items():
            none = None if text is None else signed_heads.SignedHead(of, 0, "")
            heads[lab] = signed_heads.read(text) if text else none
    except inner.NoSwitch:
        print("no other lab was asked: the switch of this one does not run")
    return heads | ({own: seen.head} if seen else {})


def _cosigned(folder: pathlib.Path) -> Heads:
    """Returns the head of this log that each lab has cosigned, by its witnessed key."""
    known, kept = witness.Witness(folder), signed_heads.cosigned_in(folder)
    # The file, as each copy of it, could name any key.
    return {
        lab: head
        for lab, (head, by) in kept.items()
        if (seen := known.seen(lab)) is not None and seen.verifier.key == by.key
    }


def _witnessed(folder: pathlib.Path, found: Heads) -> int:
    """Prints who has witnessed how much; returns how many have all that is not new."""
    now = site_folder.utc_now()
    first, last = (now - UNWITNESSED).isoformat(), (now + AHEAD).isoformat()
    count = 0
    for lab, head in sorted(found.items()):
        size = head.size if head else 0
        what = "cannot be asked" if head is None else "has witnessed nothing of it"
        print(f"witnessed by {lab} up to entry {size - 1}" if size else f"{lab} {what}")
        rest = itertools.islice(audit_entries.read(folder), size, None)
        is_new = all(first < entry.time <= last for entry in rest)
        count += bool(size) and is_new
    return count


def _seen(given: argparse.Namespace, folder: pathlib.Path) -> witness.Seen | None:
    """Returns what this lab has witnessed of the log of another."""
    own, lab = arguments.folder(given).audit, _lab_of(folder)
    return witness.Witness(own).seen(lab) if lab and own.is_dir() else None


def _lab_of(folder: pathlib.Path) -> str:
    """Returns whose log it is that a folder says it has; empty if it says nothing."""
    try:
        return signed_heads.verifier_of(folder).lab
    except audit.AuditError:  # which is wrong in any case
        return ""


def _differences(given: argparse.Namespace) -> list[str]:
    """Prints where two labs have counted different sums."""
    if given.peer_copy is None:
        return []
    own = arguments.folder(given)
    own.load()
    copy = _copy(given.peer_copy)
    lab, seen = _lab_of(copy), _seen(given, copy)
    held = [(own.load().name, seen.head)] if seen else []
    found = list(audit_verify.verify(copy, held, seen.verifier if seen else None))
    found = found or audit_counts.reconcile(own.audit, copy)
    for each in found:
        print(f"wrong: {each}")
    if not found:
        print(f"{copy}: both labs, this one and {lab}, have counted the same bytes")
        if not seen:
            print(f"but that the copy is of {lab} it says itself: none was seen here")
    return found


def _audit(given: argparse.Namespace) -> pathlib.Path:
    """Returns the folder of the log that is meant; a copy needs no lab here."""
    if given.folder is not None:
        return _copy(given.folder)
    place = arguments.folder(given)
    place.load()
    return place.audit


def _copy(path: pathlib.Path) -> pathlib.Path:
    """Returns the folder of a copy, which may be in the copy of a lab's folder."""
    found = path / "audit" if (path / "audit").is_dir() else path
    if not audit.paths(found).log.is_file():
        raise arguments.InputError(f"{path}: there is no audit log (log.jsonl)")
    return found
