"""Incarnations: how often a trainer was started, and what its peers have shown.

Both sides of a connection exchange their numbers. A number that goes back means that a
machine was restored from an older copy, or that there are two of one trainer: either
could send frames of a state that its peer has left behind. So numbers are kept on disk,
and one that goes back is refused. Who has lost them begins at the seconds of a clock,
which are more than any count of starts; no clock has another part in it. A number is
shown with random bits of the start: of two clones with one number, one is refused.
"""

import fcntl
import json
import os
import pathlib
import secrets
import time
from typing import Any

from nebula_jax import errors, files, printable, strict_json
from nebula_jax.security import names

SALT_BITS = 31
"""Random bits of a start, below its number, in the 63 that are shown."""
MOST_OF_LAB = 256
"""Clusters of one lab whose numbers are kept: it can make up names without end."""


class IncarnationError(errors.NebulaError):
    """An incarnation that went back, or that is here twice."""


def shown(number: int) -> int:
    """Returns what a start with a number shows."""
    return number << SALT_BITS | secrets.randbits(SALT_BITS)


class Incarnations:
    """The numbers that one trainer of one job has on disk, and a lock on them."""

    def __init__(self, folder: pathlib.Path, job: str, cluster: str) -> None:
        """Begins the next incarnation.

        Args:
          folder: for all trainers of a lab.

        Raises:
          IncarnationError: if the trainer runs already, or its numbers cannot be read.
        """
        where = folder / job.replace("/", "-")
        for each in (folder, where):  # the mode of parents is not asked for
            each.mkdir(exist_ok=True, mode=0o700)
        self._path = where / f"{names.label(cluster)}.json"
        self._lock = os.open(self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            kept = self._read()
        except BlockingIOError:
            os.close(self._lock)
            raise IncarnationError(
                f"{cluster} of job {job} runs here already; another run needs another"
                " job"
            ) from None
        except BaseException:
            os.close(self._lock)
            raise
        self._peers: dict[str, int] = kept["peers"]
        self._number: int = kept["own"] + 1
        self.own = shown(self._number)
        """What this incarnation shows its peers: its number, and what is random."""
        self._write()

    def admit(self, peer: str, incarnation: int) -> None:
        """Takes the number that a peer shows.

        Args:
          peer: its name, such as `generator:0 of lab-s`.
          incarnation: what it shows, see `shown`.

        Raises:
          IncarnationError: if it has shown a higher number, or another start has shown
            this one; or its lab has more names than any has clusters.
        """
        seen = self._peers.get(peer, 0)
        if incarnation == seen:
            return
        number, last = incarnation >> SALT_BITS, seen >> SALT_BITS
        if number <= last:
            raise IncarnationError(
                f"{printable.line(peer)} shows incarnation {number} after {last}:"
                " it was restored from an older copy, or runs twice"
            )
        lab = peer.rpartition(" of ")[2]
        of_lab = sum(each.rpartition(" of ")[2] == lab for each in self._peers)
        if peer not in self._peers and of_lab >= MOST_OF_LAB:
            raise IncarnationError(
                f"{printable.line(lab)} has shown {of_lab} clusters, and no more are"
                f" taken: remove those from {self._path} that are none"
            )
        self._peers[peer] = incarnation
        self._write()

    def close(self) -> None:
        """Lets another process begin the next one."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _read(self) -> dict[str, Any]:
        try:
            kept = strict_json.loads(self._path.read_bytes())
            if set(kept) == {"own", "peers"} and all(
                type(number) is int for number in (kept["own"], *kept["peers"].values())
            ):
                return kept
        except FileNotFoundError:
            return {"own": int(time.time()), "peers": {}}
        except (OSError, ValueError, TypeError, AttributeError):
            pass
        raise IncarnationError(
            f"{self._path}: cannot be read; it keeps a restored copy of a machine out,"
            " so it is not made anew"
        )

    def _write(self) -> None:
        with files.writing(self._path) as path:
            path.write_text(json.dumps({"own": self._number, "peers": self._peers}))
