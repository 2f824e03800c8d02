"""The witness that a lab is to its peers' audit logs.

A peer sends each head that it signs, with the hashes of the lines since the one before.
The witness keeps the newest one, and the lab cosigns it (`Log.cosign`). It refuses one
that is smaller, one that is not a continuation, one of another key: a peer that wants
to change or drop an entry that was witnessed is found out, for it must show another log
here.

What a witness has forgotten, it cannot refuse; then the peer sees that it would
continue from a smaller size than it has cosigned, and records that (`Log.cosigned`).

The key of the log of the authority's lab is in the authority's certificate. Of another
peer, the first key that it shows is kept, and no other is taken; the peer itself is
authenticated by its certificate. If it has begun a new log, somebody moves its file
away here: a decision of a person.
"""

import json
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

from nebula_jax import printable
from nebula_jax.security import audit, private_files
from nebula_jax.security.audit import AuditError, signed_heads
from nebula_jax.security.membership import site_folder

SUFFIX = ".seen"  # of a file for each peer: the newest head, and its log's public key


class Seen(NamedTuple):
    """The newest head of a peer's log that this lab has cosigned."""

    head: signed_heads.SignedHead
    verifier: signed_heads.Verifier  # the public key of the peer's log


class Witness:
    """The witness of one lab, for the logs of all its peers: its switch."""

    def __init__(
        self, folder: pathlib.Path, known: signed_heads.Verifier | None = None
    ) -> None:
        """Makes one, with what it has seen before in `folder`, its own lab's `audit`.

        `known` is the public key of the one log that is known beforehand. Raises
        AuditError if the folder cannot be used.
        """
        self._folder, self._known = audit.paths(folder).peers, known
        with audit.disk_errors(self._folder):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def seen(self, peer: str) -> Seen | None:
        """Returns what was seen of a peer's log; None if nothing was.

        Raises:
          AuditError: if the file is damaged. Without it, the log can be witnessed only
            anew: somebody moves it away for that.
          private_files.PrivateFileError: if others can read it.
          site_folder.FederationError: if no lab can have this name.
        """
        path = self._path(peer)
        if not path.exists():
            return None
        text = private_files.read(path)
        try:
            head, verifier = text.removesuffix("\n").split("\n")
            seen = Seen(signed_heads.read(head), signed_heads.read_verifier(verifier))
            if signed_heads.is_signed(*seen):
                return seen
        except (ValueError, signed_heads.HeadError):
            pass
        raise AuditError(f"{path}: the file is damaged: put a copy of it back")

    def size(self, peer: str) -> int:
        """Returns the size from which a peer proves the next head; errors as `seen`."""
        seen = self.seen(peer)
        return seen.head.size if seen else 0

    def keep(
        self, peer: str, text: str, leaves: Sequence[bytes], verifier: str
    ) -> signed_heads.SignedHead:
        """Keeps a head of a peer's log on the disk, if it continues what was seen.

        `text` (of the head) and `verifier` (the public key of the peer's log) are any
        text, `leaves` (as of `Log.head_after`, given `size(peer)`) any bytes. Returns
        the head, which may be cosigned. Raises AuditError if it is refused, or what was
        seen cannot be read or written; private_files.PrivateFileError,
        site_folder.FederationError likewise.
        """
        try:
            new = Seen(signed_heads.read(text), signed_heads.read_verifier(verifier))
        except signed_heads.HeadError as error:
            raise AuditError(f"{printable.line(peer)}: {error}") from None
        if new.head.lab != peer:
            raise AuditError(f"{printable.line(peer)} sent the log of {new.head.lab}")
        if not signed_heads.is_signed(*new):
            raise AuditError(f"{peer}'s head is not signed by it")
        if self._known and self._known.lab == peer and self._known != new.verifier:
            raise AuditError(
                f"{peer} shows another key of its audit log than the authority's"
                " certificate names"
            )
        seen = self.seen(peer)
        if seen is not None:
            self._check(peer, seen, new, leaves)
        elif leaves:
            raise AuditError(f"{peer} proves from a size that was not seen here")
        if new != seen:
            lines = f"{new.head.text}\n{new.verifier.text}\n"
            private_files.write(self._path(peer), lines)
        return new.head

    def _check(self, peer: str, seen: Seen, new: Seen, leaves: Sequence[bytes]) -> None:
        """Raises if a signed head does not continue what was seen."""
        if new.verifier != seen.verifier:
            raise AuditError(
                f"{peer} shows another key of its audit log than before: it lost its"
                " log or hides it; if it has begun a new one for a good reason, move"
                f" {self._path(peer)} away"
            )
        old, now = seen.head, new.head
        if now == old:
            return  # sent again, with the proof that led to it
        if now.size < old.size:
            text = f"{peer}'s audit log has {now.size} entries after {old.size}"
        elif now.size == old.size:
            text = f"{peer} has signed two audit logs of {now.size} entries"
        elif not signed_heads.continues(old, now, leaves):
            text = (
                f"{peer}'s audit log of {now.size} entries does not continue that of"
                f" {old.size}, or the proof is wrong"
            )
        else:
            return
        # Evidence that the peer has signed against itself; the first is enough.
        kept = self._folder / f"{peer}.refused.json"
        if not kept.exists():
            value = {"seen": old.text, "refused": now.text}
            private_files.write(kept, json.dumps(value, indent=1))
        raise AuditError(f"{text}; both heads are in {kept}")

    def _path(self, peer: str) -> pathlib.Path:
        site_folder.check_lab(peer)  # no other name leads to a file
        return self._folder / f"{peer}{SUFFIX}"
