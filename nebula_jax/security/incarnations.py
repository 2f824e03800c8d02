"""Incarnations: how often a trainer was started, and what its peers have shown.

Both sides of a connection exchange their numbers. A number that goes back means that a
machine was restored from an older copy, or that there are two of one trainer: either
could send frames of a state that its peer has left behind. So numbers are kept on disk,
and one that goes back is refused. Who has lost them begins at the seconds of a clock,
which are more than any count of starts; no clock has another part in it. A number is
shown with random bits of the start: of two clones with one number, one is refused.
"""

import fcntl
import os
import pathlib
import secrets
import time

from nebula_jax import errors, printable
from nebula_jax.security import names, store

SALT_BITS = 31  # random bits of a start, below its number, in the 63 that are shown
MOST_OF_LAB = 256  # clusters of a lab whose numbers are kept: it can make up names


class IncarnationError(errors.NebulaError):
    """An incarnation that went back, or that is here twice."""


def shown(number: int) -> int:
    """Returns what a start with a number shows."""
    return number << SALT_BITS | secrets.randbits(SALT_BITS)


class Incarnations:
    """The numbers that one trainer of one job has on disk, and a lock on them."""

    def __init__(self, folder: pathlib.Path, job: str, cluster: str) -> None:
        """Begins the next incarnation, in a folder for all trainers of a lab.

        Raises IncarnationError if the trainer runs already, store.StoreError if its
        numbers cannot be read: they keep a restored copy of a machine out, so none are
        made anew.
        """
        where = folder / job.replace("/", "-")
        for each in (folder, where):  # the mode of parents is not asked for
            each.mkdir(exist_ok=True, mode=0o700)
        path = where / f"{names.label(cluster)}.json"
        self._store = store.Store(path, ("own", "peers"))
        self._lock = os.open(path.with_suffix(".running"), os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._store.create()
            with self._store.changing() as tables:
                own = tables["own"]
                own["number"] = own.get("number", int(time.time())) + 1
        except BlockingIOError:
            os.close(self._lock)
            raise IncarnationError(
                f"{cluster} of job {job} runs here already; another run needs another"
                " job"
            ) from None
        except BaseException:
            os.close(self._lock)
            raise
        self.own = shown(own["number"])  # its number and random bits, as peers see them

    def admit(self, peer: str, incarnation: int) -> None:
        """Takes what a peer, such as `generator:0 of lab-s`, shows; see `shown`.

        Raises IncarnationError if it has shown a higher number, or another start has
        shown this one, or its lab has more names than any has clusters.
        """
        with self._store.changing() as tables:
            peers = tables["peers"]
            seen = peers.get(peer, 0)
            number, last = incarnation >> SALT_BITS, seen >> SALT_BITS
            if incarnation != seen and number <= last:
                raise IncarnationError(
                    f"{printable.line(peer)} shows incarnation {number} after {last}:"
                    " it was restored from an older copy, or runs twice"
                )
            lab = peer.rpartition(" of ")[2]
            of_lab = sum(each.rpartition(" of ")[2] == lab for each in peers)
            if peer not in peers and of_lab >= MOST_OF_LAB:
                raise IncarnationError(
                    f"{printable.line(lab)} has shown {of_lab} clusters in this job,"
                    " and no more are taken: begin another job"
                )
            peers[peer] = incarnation

    def close(self) -> None:
        """Lets another process begin the next one."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
