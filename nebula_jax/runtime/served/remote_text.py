"""Text that another lab serves: rows come over a link, and no path is ever seen.

    with remote_text.RemoteText(settings, wanted, name, digest, form) as text:
        key, splits = text.part("mono/es", ("train", "valid"))
        batches = resumable_batches.numbered(..., fetch=text.fetch)

A row for itself would take a round trip. So `fetch` reads the rows of a whole batch, of
whatever parts, with as few requests as hold them, all sent before the first is waited
for. Threads that read ahead take turns.

N rows of a request, L tokens of a row.
"""

import contextlib
import dataclasses
import pathlib
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

import nebula_jax
from nebula_jax import errors
from nebula_jax.communication import selector
from nebula_jax.communication.codecs import bits
from nebula_jax.communication.link import Link
from nebula_jax.communication.wire import activity, frames, session
from nebula_jax.runtime import connect
from nebula_jax.runtime.served import data_channels
from nebula_jax.security.membership import site_folder


class NoMoreText(errors.NebulaError):
    """The end of what may be read; the reason is the service's, or the line's."""


class RemoteRows(Sequence[dict[str, np.ndarray]]):
    """The rows of one split of one part, as `packed_sequences` gives them."""

    def __init__(self, text: "RemoteText", first: int, count: int) -> None:
        """Reads nothing; `first` is the number of the first of them there."""
        self._text, self.first, self._count = text, first, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
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
        wanted: data_channels.Wanted,
        cluster: str,
        vocabulary: str,
        form: data_channels.Form,
        work: activity.Work | None = None,
    ) -> None:
        """Connects to who serves it, and reads what parts there are.

        `vocabulary` is the digest of the one that it reads with, in rows of this form.
        Raises errors.NebulaError if nobody serves it, in another form than is wanted,
        or this account has no grant.
        """
        self._flag = f"data={data_channels.PREFIX}{wanted.handle}"
        self._form = form
        folder = site_folder.Folder(pathlib.Path(settings.federation))
        # What the service learns of this reader; switches say whose it is.
        hello = frames.Hello(
            data_channels.reader_name(folder.load().name, settings.job, cluster),
            nebula_jax.__version__,
            data_channels.settings(wanted.handle, vocabulary, form.length),
            details={"rows": form.rows},
        )
        job = data_channels.job_of(wanted.handle)
        reach = dataclasses.replace(settings, job=job, peer=wanted.lab)
        with contextlib.ExitStack() as stack:
            routes = stack.enter_context(connect.Routes(reach, hello, work=work))
            self._link = _dial(routes)
            try:
                self._ends = data_channels.ends(self._link, form, serves=False)
                self._link.wait_for_welcome(settings.connect_timeout)
                page = np.asarray(self._ends.parts.recv_payload(0).payload)
                self._places = _placed(data_channels.read_description(page))
            except errors.NebulaError as error:
                self._link.abort(str(error))
                raise self._ended(error) from None
            self._routes = stack.pop_all()
        self._turn = threading.Lock()
        self._requests = 0

    def part(
        self, name: str, splits: Sequence[str]
    ) -> tuple[str, dict[str, Sequence[dict[str, np.ndarray]]]]:
        """Returns a part, such as `mono/es`, with its digest; raises NoMoreText."""
        found: dict[str, Sequence[dict[str, np.ndarray]]] = {}
        key = ""
        for split in splits:
            if (name, split) not in self._places:
                there = ", ".join(sorted({each for each, _ in self._places}))
                raise NoMoreText(
                    f"{self._flag} has no {name} to {split}; it has {there or 'none'}"
                )
            part, first = self._places[name, split]
            found[split], key = RemoteRows(self, first, part.rows), part.key
        return key, found

    def fetch(
        self, places: Sequence[tuple[Sequence[dict[str, np.ndarray]], int]]
    ) -> list[np.ndarray]:
        """Reads rows of several parts together; see `resumable_batches.Fetch`."""
        numbers = []
        for rows, number in places:
            assert isinstance(rows, RemoteRows)  # `part` has made them
            numbers.append(rows.first + number)
        return list(self.read(numbers))

    def read(self, numbers: Sequence[int]) -> np.ndarray:
        """Reads rows by their numbers in the whole corpus; any thread may.

        Returns [rows, L] int32, padded. Raises NoMoreText if they may not be read, or
        cannot.
        """
        if not len(numbers):
            return np.zeros((0, self._form.length), np.int32)
        starts = range(0, len(numbers), self._form.rows)
        parts = [numbers[start : start + self._form.rows] for start in starts]
        try:
            with self._turn:
                sent = [self._request(part) for part in parts]
                found = [
                    self._answer(number)[: len(part)]
                    for number, part in zip(sent, parts, strict=True)
                ]
        except errors.NebulaError as error:
            raise self._ended(error) from None
        return np.concatenate(found)

    def _request(self, numbers: Sequence[int]) -> int:
        wanted = np.full(self._form.rows, data_channels.NO_ROW, np.int32)
        wanted[: len(numbers)] = numbers
        self._requests += 1
        self._ends.wanted.send_payload(self._requests, selector.Selected(wanted, 0))
        return self._requests

    def _answer(self, number: int) -> np.ndarray:
        """Waits for the answer to the oldest request that has none: [N, L] int32."""
        payload = self._ends.rows.recv_payload(number).payload
        shape = (self._form.rows, self._form.length)
        ids = bits.unpack_on_host(
            np.asarray(payload.data), shape[0] * shape[1], payload.bits
        )
        return ids.astype(np.int32).reshape(shape)

    def _ended(self, error: errors.NebulaError) -> NoMoreText:
        return NoMoreText(f"{self._flag}: {error}")

    def close(self) -> None:
        """Ends the session, if it has not ended."""
        if not self._link.is_over:
            try:
                with self._turn:
                    self._request([])
                self._link.close()
            except errors.NebulaError as error:  # it was needed no more
                self._link.abort(str(error))
        self._routes.close()

    def __enter__(self) -> "RemoteText":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _dial(routes: connect.Routes) -> Link:
    """Connects; tries twice, as a try ends the former session of a killed process."""
    with contextlib.suppress(session.PeerAborted):
        return routes.dial(data_channels.CLUSTER, None)
    return routes.dial(data_channels.CLUSTER, None)


def _placed(
    parts: Sequence[data_channels.Part],
) -> dict[tuple[str, str], tuple[data_channels.Part, int]]:
    """Returns (part, split) -> it, and the number of its first row."""
    found, first = {}, 0
    for part in parts:
        found[part.name, part.split] = part, first
        first += part.rows
    return found
