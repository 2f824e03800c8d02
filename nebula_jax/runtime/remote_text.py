"""Text that another lab serves: rows come over a link, and no path is ever seen.

    with remote_text.RemoteText(settings, wanted, reading) as text:
        prepared = text.opened("mono", "es", ("train", "valid"))
        batches = resumable_batches.training_batches(..., fetch=text.fetch)

A row for itself would take a round trip. So `fetch` reads the rows of a whole batch, of
whatever parts, with as few requests as hold them, all sent before the first is waited
for; and the threads that read ahead have requests under way at the same time.

N rows of a request, L tokens of a row.
"""

import dataclasses
import pathlib
import re
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple, overload

import numpy as np

import nebula_jax
from nebula_jax import errors
from nebula_jax.communication import channels, selector
from nebula_jax.communication.codecs import bits
from nebula_jax.communication.link import Link
from nebula_jax.communication.wire import activity, frames, session
from nebula_jax.data import packed_sequences, resumable_batches
from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.runtime import connect, data_channels, own_switch
from nebula_jax.security import data_access, federation, identity, token_proof

PREFIX = "handle:"
_FLAG = re.compile(rf"{PREFIX}([^@]+)(?:@(.+))?")


class NoMoreText(errors.NebulaError):
    """The end of what may be read; the reason is the service's, or the line's."""


class Wanted(NamedTuple):
    """Data, as --data names it."""

    handle: str
    lab: str
    """That serves it; empty for whichever does."""


class Reading(NamedTuple):
    """The way in which a cluster reads."""

    cluster: str
    vocabulary: vocabularies.Vocabulary
    max_length: int  # L
    rows: int  # N


def parse(text: str) -> Wanted:
    """Reads the value of --data.

    >>> parse("handle:corpus-es@lab-s")
    Wanted(handle='corpus-es', lab='lab-s')

    Raises:
      errors.SettingsError: if it names no data.
    """
    found = _FLAG.fullmatch(text)
    if found is None or not data_access.is_handle(found[1]):
        raise errors.SettingsError(
            f"--data={text}: expected handle:NAME, or handle:NAME@LAB, as in"
            " handle:corpus-es"
        )
    wanted = Wanted(found[1], found[2] or "")
    if wanted.lab and not federation.is_lab(wanted.lab):
        raise errors.SettingsError(f"--data={text}: {wanted.lab!r} is no lab's name")
    return wanted


class RemoteRows(Sequence[dict[str, np.ndarray]]):
    """The rows of one split of one part, as `packed_sequences` gives them."""

    def __init__(self, text: "RemoteText", first: int, count: int) -> None:
        """Reads nothing.

        Args:
          text: that they are of.
          first: number of the first of them there.
          count: how many.
        """
        self._text, self.first, self._count = text, first, count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> dict[str, np.ndarray]: ...

    @overload
    def __getitem__(self, index: slice) -> list[dict[str, np.ndarray]]: ...

    def __getitem__(
        self, index: int | slice
    ) -> dict[str, np.ndarray] | list[dict[str, np.ndarray]]:
        """Reads one row in a round trip, or those of a slice together."""
        numbers = range(self.first, self.first + self._count)[index]
        if isinstance(numbers, range):
            return [{"input_ids": ids} for ids in self._text.read(numbers)]
        return {"input_ids": self._text.read([numbers])[0]}


class RemoteText:
    """A corpus that is served elsewhere."""

    def __init__(
        self,
        settings: connect.Settings,
        wanted: Wanted,
        reading: Reading,
        work: activity.Work | None = None,
    ) -> None:
        """Connects to who serves it, and reads what parts there are.

        Args:
          settings: of this cluster, in a federation.
          wanted: the data.
          reading: how.
          work: of this process.

        Raises:
          errors.NebulaError: if nobody serves it, in another form than is wanted, or
            this account has no grant.
        """
        self._wanted = wanted
        self._form = data_channels.Form(
            reading.rows, reading.max_length, reading.vocabulary.size
        )
        folder = federation.Folder(pathlib.Path(settings.federation))
        token, lab = own_switch.token_of(folder, settings.account), folder.load().name
        with identity.Identity.open(folder.path) as found:
            account = found.account_of(token, time.time()).name
        name = data_channels.reader_name(lab, account, settings.job, reading.cluster)
        hello = frames.Hello(
            name,
            nebula_jax.__version__,
            data_channels.settings(
                wanted.handle, reading.vocabulary.digest, reading.max_length
            ),
            details={
                "account": account,
                "job": settings.job,
                "cluster": reading.cluster,
                "rows": reading.rows,
            },
        )
        self._link = _dial(settings, wanted, hello, work)
        try:
            self._ends = data_channels.reader_ends(self._link, self._form)
            self._link.wait_for_welcome(settings.connect_timeout)
            proof = token_proof.make(token, self._about(name))
            self._send(self._ends.proof, 0, np.frombuffer(proof, np.uint8))
            self._places = _placed(self._read_parts())
        except errors.NebulaError as error:
            self._link.abort(str(error))
            raise self._ended(error) from None
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._requests = 0
        self._answers = 0
        self._kept: dict[int, np.ndarray] = {}

    def _about(self, name: str) -> tuple[str, str, str, str]:
        """Returns what the proof of this account is for."""
        owner = federation.parse_name(self._link.owner)
        nonce = self._link.peer.details.get("nonce")
        if owner is None or not isinstance(nonce, str):
            raise data_channels.DataError("what serves the data is no such service")
        return owner[0], self._wanted.handle, nonce, name

    def _read_parts(self) -> list[data_channels.Part]:
        pages: list[np.ndarray] = []
        while not pages or not data_channels.is_last_page(pages[-1]):
            if len(pages) == data_channels.MOST_PAGES:
                raise data_channels.DataError("the data's description has no end")
            page = self._ends.parts.recv_payload(len(pages)).payload
            pages.append(np.asarray(page))
        return data_channels.read_pages(pages)

    def opened(
        self, kind: str, language: str, splits: Sequence[str]
    ) -> packed_sequences.Prepared:
        """Returns a part of the corpus; see `language_mixture.Open`.

        Raises:
          NoMoreText: if it has no such part.
        """
        name, key = f"{kind}/{language}", ""
        found: dict[str, Sequence[dict[str, np.ndarray]]] = {}
        for split in splits:
            if (name, split) not in self._places:
                there = ", ".join(sorted({each for each, _ in self._places}))
                raise NoMoreText(
                    f"--data={PREFIX}{self._wanted.handle} has no {name} to {split};"
                    f" it has {there or 'nothing'}"
                )
            part, first = self._places[name, split]
            found[split], key = RemoteRows(self, first, part.rows), part.key
        return packed_sequences.Prepared(key, found)

    def fetch(self, places: Sequence[resumable_batches.Place]) -> list[np.ndarray]:
        """Reads rows of several parts together; see `resumable_batches.Fetch`."""
        numbers = []
        for rows, number in places:
            assert isinstance(rows, RemoteRows)  # `opened` has made them
            numbers.append(rows.first + number)
        return list(self.read(numbers))

    def read(self, numbers: Sequence[int]) -> np.ndarray:
        """Reads rows by their numbers in the whole corpus; any thread may.

        Returns:
          [rows, L] int32, padded.

        Raises:
          NoMoreText: if they may not be read, or cannot.
        """
        if not len(numbers):
            return np.zeros((0, self._form.length), np.int32)
        starts = range(0, len(numbers), self._form.rows)
        parts = [numbers[start : start + self._form.rows] for start in starts]
        try:
            with self._sending:
                sent = [self._request(part) for part in parts]
            found = [
                self._answer(number)[: len(part)]
                for number, part in zip(sent, parts, strict=True)
            ]
        except errors.NebulaError as error:
            raise self._ended(error) from None
        return np.concatenate(found)

    def _request(self, numbers: Sequence[int]) -> int:
        """Requests at most N rows; returns the number of the request."""
        wanted = np.full(self._form.rows, data_channels.NO_ROW, np.int32)
        wanted[: len(numbers)] = numbers
        self._requests += 1
        self._send(self._ends.wanted, self._requests, wanted)
        return self._requests

    def _answer(self, number: int) -> np.ndarray:
        """Waits for the answer to a request; others that come first are kept."""
        with self._receiving:
            while number not in self._kept:
                self._answers += 1
                payload = self._ends.rows.recv_payload(self._answers).payload
                count = self._form.rows * self._form.length
                ids = bits.unpack_on_host(np.asarray(payload.data), count, payload.bits)
                shape = (self._form.rows, self._form.length)
                self._kept[self._answers] = ids.astype(np.int32).reshape(shape)
            return self._kept.pop(number)

    def _send(self, channel: channels.Sender, number: int, array: np.ndarray) -> None:
        channel.send_payload(number, selector.Selected(array, 0))

    def _ended(self, error: errors.NebulaError) -> NoMoreText:
        """Returns an error as that of the data that it ended."""
        return NoMoreText(f"--data={PREFIX}{self._wanted.handle}: {error}")

    def close(self) -> None:
        """Ends the session; does nothing if it has ended."""
        if self._link.is_over:
            return
        try:
            with self._sending:
                self._request([])
            self._link.close()
        except errors.NebulaError as error:  # it was needed no more
            self._link.abort(str(error))

    def __enter__(self) -> "RemoteText":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _dial(
    settings: connect.Settings,
    wanted: Wanted,
    hello: frames.Hello,
    work: activity.Work | None,
) -> Link:
    """Connects to who serves the data.

    A process that was killed and comes back finds its former session there, which ends
    when it first tries: so it tries twice.
    """
    job = data_channels.job_of(wanted.handle)
    there = dataclasses.replace(settings, job=job, peer=wanted.lab)
    for is_last in (False, True):
        try:
            link = connect.dial(there, hello, peer=data_channels.CLUSTER, work=work)
        except session.PeerAborted:
            if is_last:
                raise
            continue
        assert isinstance(link, Link)  # one process of this cluster, see `check`
        return link
    raise AssertionError


def _placed(
    parts: Sequence[data_channels.Part],
) -> dict[tuple[str, str], tuple[data_channels.Part, int]]:
    """Returns (part, split) -> it, and the number of its first row."""
    found, first = {}, 0
    for part in parts:
        found[part.name, part.split] = part, first
        first += part.rows
    return found
