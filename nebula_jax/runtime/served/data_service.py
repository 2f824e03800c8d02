"""The process of an owner that serves a corpus to those who have a grant for it.

Readers come through the switches, as trainers do (`federation.switch_client`), any
number of them at any time. Who reads is never taken from what a reader sends: its lab
is the one of its certificate, and its account the one as which its switch has dialed.
Each use is counted against the grant before anything of it is served, and is in the
audit log of this lab within a second or two.
"""

import collections
import contextlib
import itertools
import queue
import socket
import threading
import time
from collections.abc import Callable

import numpy as np

import nebula_jax
from nebula_jax import errors, printable
from nebula_jax.communication import bridge, endpoints, selector
from nebula_jax.communication import listener as listener_lib
from nebula_jax.communication.link import Link
from nebula_jax.communication.wire import activity, frames, states
from nebula_jax.federation import switch_client
from nebula_jax.runtime.life import process
from nebula_jax.runtime.served import data_channels, owner_text
from nebula_jax.security import accounts, grants
from nebula_jax.security.membership import site_folder

TURN_SECONDS = 0.25  # between two looks at who has come and what is to be recorded
RECORD_SECONDS = 1.0  # between two entries of one reader
READERS = 64  # at a time: each has a thread
READERS_OF_LAB = READERS // 2  # so that no lab keeps all others out
PATIENCE_SECONDS = 24 * 3600.0  # with a reader whose steps are long, or that waits
PEER_TIMEOUT, RECONNECT_TIMEOUT = 30.0, 60.0  # seconds, as for a run's clusters
DIALED_SECONDS = 5.0  # for a stream that was just cut to come back


class DataService:
    """A handle that is served, until another thread, or a signal, calls `stop`."""

    def __init__(
        self,
        folder: site_folder.Folder,
        handle: str,
        log: Callable[[str], None] = process.message,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Opens the corpus, which is packed if it was not before.

        `clock` returns unix seconds, by which grants end. Raises errors.NebulaError if
        it cannot be read.
        """
        self._folder, self._handle, self._log = folder, handle, log
        self._lab, self._clock = folder.load().name, clock
        self._stop = threading.Event()
        self.has_started = threading.Event()  # set once readers can come
        self._threads: list[threading.Thread] = []
        self._grants = grants.Grants(accounts.Accounts(folder.path))
        self._uses: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        """Those that are not in the audit log yet: a reader's subject, and rows."""
        provider, found = self._grants.provider(handle)
        with process.timed(f"preparing {handle}"):
            self._text = owner_text.opened(provider, folder.prepared, log)
        if found.vocabulary != self._text.digest:
            raise data_channels.DataError(
                f"{handle}: its vocabulary is another one than was registered; put"
                " it back, or register another handle"
            )

    def stop(self) -> None:
        """Ends `run`; any thread or signal handler may call it."""
        self._stop.set()

    def run(self) -> None:
        """Serves until `stop`; raises errors.NebulaError if it cannot begin."""
        with contextlib.ExitStack() as stack:
            trainer = switch_client.Trainer(
                self._folder,
                data_channels.job_of(self._handle),
                data_channels.CLUSTER,
                lab="",
                log=self._log,
            )
            stack.callback(trainer.close)
            stack.callback(self._record)
            work = activity.Work(PATIENCE_SECONDS)
            stack.enter_context(work.busy(activity.Activity.COMPUTING))
            listener = stack.enter_context(self._listener(trainer, work))
            trainer.serve(listener.address[1], is_shared=True)
            self._log(f"serving {self._handle}: {len(self._text):,} rows")
            self.has_started.set()
            links: list[Link] = []
            stack.callback(self._end, links)
            self._take_readers(listener, trainer, links)

    def _listener(
        self, trainer: switch_client.Trainer, work: activity.Work
    ) -> listener_lib.Listener:
        text = self._text
        hello = frames.Hello(
            data_channels.CLUSTER,
            nebula_jax.__version__,
            data_channels.settings(self._handle, text.digest, text.max_length),
        )
        listening: socket.socket = endpoints.listen(("127.0.0.1", 0))
        return listener_lib.Listener(
            listening,
            hello,
            peer_timeout=PEER_TIMEOUT,
            reconnect_timeout=RECONNECT_TIMEOUT,
            tls=trainer.server_context,
            log=self._log,
            work=work,
            finish=trainer.finish(states.Role.LISTENER),
        )

    def _end(self, links: list[Link]) -> None:
        for link in links:
            link.abort(f"{self._handle} is not served any more")
        for thread in self._threads:
            thread.join()

    def _take_readers(
        self,
        listener: listener_lib.Listener,
        trainer: switch_client.Trainer,
        links: list[Link],
    ) -> None:
        recorded = time.monotonic()
        while not self._stop.is_set():
            try:
                link = listener.accept(TURN_SECONDS)
            except bridge.NobodyThere:
                pass
            except errors.NebulaError as error:
                self._log(f"refused a reader: {error}")
            else:
                links[:] = [each for each in links if not each.is_over]
                self._threads = [each for each in self._threads if each.is_alive()]
                of_lab = sum(each.owner == link.owner for each in links)
                if len(self._threads) >= READERS or of_lab >= READERS_OF_LAB:
                    link.abort(f"too many others read {self._handle} at present")
                    continue
                links.append(link)
                thread = threading.Thread(
                    target=self._serve, args=(link, trainer), daemon=True
                )
                self._threads.append(thread)
                thread.start()
            if time.monotonic() >= recorded + RECORD_SECONDS:
                self._record()
                recorded = time.monotonic()

    def _record(self) -> None:
        """Brings the uses so far to the audit log; those it does not take, later."""
        sums = collections.Counter[str]()
        while not self._uses.empty():
            subject, rows = self._uses.get()
            sums[subject] += rows
        for subject, rows in sums.items():
            about = {
                "job": data_channels.job_of(self._handle),
                "cluster": data_channels.CLUSTER,
                "event": "served",
                "handle": self._handle,
                "rows": rows,
                "subject": subject,
            }
            try:
                switch_client.record(self._folder, "data", about)
            except (errors.NebulaError, OSError) as error:
                self._uses.put((subject, rows))
                if self._stop.is_set():
                    self._log(
                        f"{subject} has read {rows:,} rows that the audit log does not"
                        f" have: {error}; the grant has counted them"
                    )

    # One reader, in a thread of its own.

    def _serve(self, link: Link, trainer: switch_client.Trainer) -> None:
        who = printable.line(link.peer.cluster)
        try:
            subject = self._served(link, trainer)
            link.close()
            self._log(f"{subject} has read what it wanted")
        except grants.GrantError as error:
            self._log(f"ended a session of {who}: {error}")
            link.abort(str(error))
        except errors.NebulaError as error:
            if not self._stop.is_set():
                self._log(f"the session of {who} ended: {error}")
            link.abort(str(error))
        except Exception as error:  # of a damaged corpus: others can be served
            self._log(f"the session of {who} failed: {error!r}")
            link.abort(f"{self._handle} cannot be read at present; its owner sees why")

    def _served(self, link: Link, trainer: switch_client.Trainer) -> str:
        """Serves a reader until it needs no more; returns who it was."""
        subject, form = self._dialed(link, trainer), self._form(link)
        # Before it can wait for anything: who has no grant takes nobody's place.
        self._count(subject, 0)
        ends = data_channels.ends(link, form, serves=True)
        link.welcome(0)
        page = data_channels.described(self._text.parts)
        ends.parts.send_payload(0, selector.Selected(page, 0))
        for number in itertools.count(1):
            wanted = np.ascontiguousarray(ends.wanted.recv_payload(number).payload)
            rows = _checked(wanted.reshape(-1).view(np.int32), len(self._text))
            if not rows:
                break
            self._count(subject, len(rows))
            ends.rows.send(number, self._text.rows(rows, form.rows))
        return subject

    def _dialed(self, link: Link, trainer: switch_client.Trainer) -> str:
        """Returns who a reader is, as the switches know it: `ana`, or `ana@lab-t`."""
        owner = site_folder.parse_name(link.owner)
        if owner is None:
            raise data_channels.DataError("is of no lab")
        deadline = time.monotonic() + DIALED_SECONDS
        while not (dialed := trainer.dialed_by(link.peer.cluster, owner[0])):
            if time.monotonic() > deadline:
                raise data_channels.DataError("no switch has dialed as this reader")
            time.sleep(TURN_SECONDS)
        if len(dialed) > 1:  # one of them reads in the other's name
            raise data_channels.DataError(f"{' and '.join(sorted(dialed))} read as one")
        return dialed.pop().removesuffix(f"@{self._lab}")

    def _form(self, link: Link) -> data_channels.Form:
        """Returns how a reader reads; raises data_channels.DataError if none can."""
        rows = link.peer.details.get("rows")
        if not (type(rows) is int and 0 < rows <= data_channels.MOST_REQUEST):
            raise data_channels.DataError("sent no number of rows")
        return data_channels.Form(rows, self._text.max_length, self._text.pieces)

    def _count(self, subject: str, rows: int) -> None:
        """Counts a use that is about to be served."""
        self._grants.use(subject, self._handle, rows, self._clock())
        self._uses.put((subject, rows))


def _checked(wanted: np.ndarray, total: int) -> list[int]:
    """Returns the numbers of rows in a request, [N] int32 as it came, of `total`."""
    count = int((wanted != data_channels.NO_ROW).sum())
    rows = wanted[:count]
    if count and (rows.min() < 0 or rows.max() >= total):
        raise data_channels.DataError(
            f"requested rows {rows.min()} to {rows.max()}; there are 0 to {total - 1}"
        )
    return [int(row) for row in rows]
