"""The session of one reader of a handle: who it is, and what it is served.

Each use is counted against the reader's grant before anything of it leaves.
"""

import itertools
import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from nebula_jax.communication import selector
from nebula_jax.communication.link import Link
from nebula_jax.federation import requests
from nebula_jax.runtime.served import data_channels, owner_text
from nebula_jax.security import accounts, grants, names
from nebula_jax.security.accounts.identity import Identity
from nebula_jax.security.membership import site_folder


class Reader(NamedTuple):
    """A reader, as proven."""

    subject: str
    """As in `ana`, or `ana@lab-t`."""
    job: str
    """As in `ana/m3`."""


class Tally:
    """The uses that are not in the audit log yet."""

    def __init__(self) -> None:
        """Starts without a use."""
        self._lock = threading.Lock()
        self._counts: dict[Reader, tuple[int, int]] = {}

    def add(self, reader: Reader, rows: int, nbytes: int) -> None:
        """Adds a use."""
        with self._lock:
            before = self._counts.get(reader, (0, 0))
            self._counts[reader] = before[0] + rows, before[1] + nbytes

    def take(self) -> dict[Reader, tuple[int, int]]:
        """Returns reader -> rows and bytes, and begins anew."""
        with self._lock:
            taken, self._counts = self._counts, {}
            return taken


class Handle(NamedTuple):
    """A handle that is served, and what it takes to decide about its readers."""

    name: str
    lab: str
    """That serves it."""
    nonce: str
    """Drawn by this run of the service: proofs are for it alone."""
    text: owner_text.ServedText
    people: Identity
    tally: Tally
    clock: Callable[[], float]
    """Returns unix seconds, by which grants end."""

    def serve(self, link: Link) -> Reader:
        """Serves a reader until it needs no more; returns who it was.

        Args:
          link: to it, not yet welcome.

        Raises:
          grants.GrantError: at a use that its grant does not allow.
          errors.NebulaError: if it is not who it claims to be, requests what is not
            there, or has gone.
        """
        reader, form = self._claimed(link)
        # Before it can wait for anything: who has no grant takes nobody's place.
        granted = grants.Grants(self.people.store)
        granted.use(reader.subject, self.name, 0, 0, self.clock())
        ends = data_channels.ends(link, form, serves=True)
        link.welcome(0)
        proof = _bytes_of(ends.proof.recv_payload(0)).tobytes()
        if "@" not in reader.subject:
            about = (self.lab, self.name, self.nonce, link.peer.cluster)
            if not self.people.has_token(reader.subject, about, proof, self.clock()):
                raise data_channels.DataError(
                    f"{reader.subject} has not shown a token: log in again"
                )
        pages = data_channels.pages_of(self.text.parts)
        self._count(reader, 0, sum(page.nbytes for page in pages))
        for number, page in enumerate(pages):
            ends.parts.send_payload(number, selector.Selected(page, 0))
        row_bytes = sum(ends.rows.format.buffer_sizes()[0])
        for number in itertools.count(1):
            wanted = _bytes_of(ends.wanted.recv_payload(number)).view(np.int32)
            rows = _checked(wanted, len(self.text))
            if not rows:
                break
            # All N rows cross, whatever the request has.
            self._count(reader, len(rows), row_bytes)
            ends.rows.send(number, self.text.rows(rows, form.rows))
        return reader

    def _claimed(self, link: Link) -> tuple[Reader, data_channels.Form]:
        """Returns who a reader is, if it proves it, and how it reads.

        Raises:
          data_channels.DataError: if it cannot be.
        """
        owner = site_folder.parse_name(link.owner)
        claimed = link.peer.details
        account, job, cluster, rows = (
            claimed.get(name) for name in ("account", "job", "cluster", "rows")
        )
        if (
            owner is None
            or not (isinstance(account, str) and accounts.is_name(account))
            or not (isinstance(job, str) and requests.is_job(job))
            or not (isinstance(cluster, str) and names.is_cluster(cluster))
            or not (type(rows) is int and 0 < rows <= data_channels.MOST_REQUEST)
        ):
            raise data_channels.DataError("sent no account, job, cluster or rows")
        lab = owner[0]
        name = data_channels.reader_name(lab, account, job, cluster)
        if name != link.peer.cluster:
            raise data_channels.DataError(f"is not {account} of {lab} in job {job}")
        is_own = lab == self.lab
        subject = account if is_own else accounts.vouched(account, lab)
        text = self.text
        form = data_channels.Form(rows, text.max_length, text.pieces)
        return Reader(subject, f"{account}/{job}"), form

    def _count(self, reader: Reader, rows: int, nbytes: int) -> None:
        """Counts a use that is about to be served."""
        now = self.clock()
        grants.Grants(self.people.store).use(
            reader.subject, self.name, rows, nbytes, now
        )
        self.tally.add(reader, rows, nbytes)


def _bytes_of(selected: selector.Selected) -> np.ndarray:
    """Returns the bytes of a payload of one array."""
    found: np.ndarray = np.ascontiguousarray(selected.payload).reshape(-1)
    return found.view(np.uint8)


def _checked(wanted: np.ndarray, total: int) -> list[int]:
    """Returns the numbers of the rows in a request.

    Args:
      wanted: [N] int32, as it came.
      total: rows that there are.

    Raises:
      data_channels.DataError: if there is no such row.
    """
    count = int((wanted != data_channels.NO_ROW).sum())
    rows = wanted[:count]
    if count and (rows.min() < 0 or rows.max() >= total):
        raise data_channels.DataError(
            f"requested rows {rows.min()} to {rows.max()}; there are 0 to {total - 1}"
        )
    return [int(row) for row in rows]
