"""The process of an owner that serves a corpus to those who have a grant for it.

Readers come through the switches, as trainers do (`own_switch`), any number of them at
any time. Who reads is never taken from what a reader sends: its lab is the one of its
certificate, which vouches for its accounts (`ana@lab-t`); an account of this lab proves
that it has its token (`accounts.tokens`). Each use is counted against the grant before
anything of it is served, and is in the audit log of this lab within a second or two.
A use that the grant does not allow ends the reader's session with the reason.
"""

import contextlib
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

import nebula_jax
from nebula_jax import errors, printable
from nebula_jax.communication import bridge, endpoints
from nebula_jax.communication import listener as listener_lib
from nebula_jax.communication.link import Link
from nebula_jax.communication.wire import activity, frames, states
from nebula_jax.federation import switch_client
from nebula_jax.runtime.life import process
from nebula_jax.runtime.served import data_channels, data_session, owner_text
from nebula_jax.security import grants
from nebula_jax.security.accounts import identity, tokens
from nebula_jax.security.audit import entries
from nebula_jax.security.grants import handles
from nebula_jax.security.membership import site_folder

TURN_SECONDS = 0.25  # between two looks at who has come and what is to be recorded
RECORD_SECONDS = 1.0  # between two entries of one reader
READERS = 64  # at a time: each has a thread
READERS_OF_LAB = READERS // 2  # so that no lab keeps all others out
PATIENCE_SECONDS = 24 * 3600.0  # with a reader whose steps are long, or that waits
PEER_TIMEOUT, RECONNECT_TIMEOUT = 30.0, 60.0  # seconds, as for a run's clusters
PREPARED = "prepared"  # in the account's work folder


class DataService:
    """A handle that is served.

    service = DataService(folder, "corpus-es", account="")
    service.run()      # until another thread, or a signal, calls service.stop()
    """

    def __init__(
        self,
        folder: site_folder.Folder,
        handle: str,
        account: str = "",
        log: Callable[[str], None] = process.message,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Opens the corpus, which is packed if it was not before.

        Args:
          folder: of the lab.
          handle: its name.
          account: that has logged in; empty for the folder's owner.
          log: called with a line for a person.
          clock: returns unix seconds, by which grants end.

        Raises:
          errors.NebulaError: if the account may not serve it, or it cannot be read.
        """
        self._folder, self._handle, self._account = folder, handle, account
        self._log, self._job = log, data_channels.job_of(handle)
        self._stop = threading.Event()
        self.has_started = threading.Event()
        """Set once readers can come."""
        self._threads: list[threading.Thread] = []
        self._identity = identity.Identity.open(folder.path)
        try:
            token = tokens.read(folder, account)
            by = self._identity.account_of(token, clock())
            access = handles.Handles(self._identity.store)
            provider = access.provider(by, handle)
            work_folder = self._identity.work_folder(by)
            with process.timed(f"preparing {handle}"):
                text = owner_text.opened(provider, work_folder / PREPARED, log)
            expected = access.find(handle).vocabulary
            if expected != text.digest:
                raise data_channels.DataError(
                    f"{handle}: its vocabulary is another one than was registered; put"
                    " it back, or register another handle"
                )
        except BaseException:
            self._identity.close()
            raise
        self._tally = data_session.Tally()
        self._served = data_session.Handle(
            name=handle,
            lab=folder.load().name,
            nonce=secrets.token_hex(16),
            text=text,
            people=self._identity,
            tally=self._tally,
            clock=clock,
        )

    def stop(self) -> None:
        """Ends `run`; any thread or signal handler may call it."""
        self._stop.set()

    def run(self) -> None:
        """Serves until `stop`.

        Raises:
          errors.NebulaError: if it cannot begin, as without a running switch.
        """
        with contextlib.ExitStack() as stack:
            stack.callback(self._identity.close)
            trainer = switch_client.Trainer(
                self._folder,
                self._account,
                self._job,
                data_channels.CLUSTER,
                lab="",
                log=self._log,
            )
            stack.callback(trainer.close)
            stack.callback(self._record, trainer)
            work = activity.Work(PATIENCE_SECONDS)
            stack.enter_context(work.busy(activity.Activity.COMPUTING))
            listener = stack.enter_context(self._listener(trainer, work))
            trainer.serve(listener.address[1], is_shared=True)
            self._log(f"serving {self._handle}: {len(self._served.text):,} rows")
            self.has_started.set()
            with self._all_links() as links:
                self._take_readers(listener, trainer, links)

    def _listener(
        self, trainer: switch_client.Trainer, work: activity.Work
    ) -> listener_lib.Listener:
        text = self._served.text
        hello = frames.Hello(
            data_channels.CLUSTER,
            nebula_jax.__version__,
            data_channels.settings(self._handle, text.digest, text.max_length),
            details={"nonce": self._served.nonce},
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

    @contextlib.contextmanager
    def _all_links(self) -> Iterator[list[Link]]:
        """Yields a list of links, which are ended with the block."""
        links: list[Link] = []
        try:
            yield links
        finally:
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
                thread = threading.Thread(target=self._serve, args=(link,), daemon=True)
                self._threads.append(thread)
                thread.start()
            if time.monotonic() >= recorded + RECORD_SECONDS:
                self._record(trainer)
                recorded = time.monotonic()

    def _record(self, trainer: switch_client.Trainer) -> None:
        """Brings the uses so far to the audit log; those it does not take, later."""
        waiting = self._tally.take()
        for reader, (rows, nbytes) in waiting.items():
            try:
                trainer.record(
                    "data",
                    event="served",
                    handle=self._handle,
                    rows=rows,
                    nbytes=nbytes,
                    subject=reader.subject,
                    by=entries.without_secret(reader.job),
                )
            except (errors.NebulaError, OSError) as error:
                self._tally.add(reader, rows, nbytes)
                if self._stop.is_set():
                    self._log(
                        f"{reader.subject} has read {rows:,} rows ({nbytes:,} bytes)"
                        f" that the audit log does not have: {error}; the grant has"
                        " counted them"
                    )

    # One reader, in a thread of its own.

    def _serve(self, link: Link) -> None:
        who = printable.line(link.peer.cluster)
        try:
            reader = self._served.serve(link)
            link.close()
            self._log(f"{reader.subject} has read what it wanted")
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


def serve(
    folder: site_folder.Folder,
    handle: str,
    account: str = "",
    log: Callable[[str], None] = process.message,
) -> int:
    """Serves a handle until SIGTERM or SIGINT; returns the exit status.

    For the arguments and errors see `DataService`.
    """
    service = DataService(folder, handle, account, log)

    def stop(number: int, frame: FrameType | None) -> None:
        del number, frame
        service.stop()

    before = {
        number: signal.signal(number, stop)
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        service.run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    log(f"{handle} is not served any more")
    return 0
