"""One conversation with another cluster, as experiments see it.

A link lives as long as its session, over as many connections as the line allows: see
`wire.session` for the protocol, `wire.driver` for how bytes move. Both ends keep memory
bounded: `send` blocks while the peer has not acknowledged what was sent before, and the
socket is not read while enough waits to be used, so that TCP holds the sender back.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from nebula_jax import errors
from nebula_jax import trace as trace_lib
from nebula_jax.communication import agreement, channels, selector, wan
from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication.wire import (
    activity,
    driver,
    frames,
    greeting,
    receive_queue,
    stuck_peers,
)
from nebula_jax.communication.wire import session as session_lib
from nebula_jax.communication.wire import zstd as zstd_lib

STUCK_SECONDS = 60.0  # that both sides send, and neither receives
RECHECK_SECONDS = 0.1  # whether another thread has made room
LOOK_SECONDS = 1.0  # between two looks whether this process is to stop
LOST_SECONDS = 3.0  # without a connection: one that breaks is mostly back sooner


class Timeout(errors.PeerAbsent):
    """A message of the peer that did not come within connect_timeout."""


class Link:
    """One conversation with another cluster; `bridge` and `listener` make them.

    A call that waits for the peer raises session.PeerGone if the peer cannot be
    reached, stuck_peers.PeerStuck if it lives and gets nothing done,
    session.PeerAborted if it has given up, session.RemoteProtocolError if it breaks the
    protocol, sends End too early or floods another channel, session.SessionOver if this
    side has ended the session, driver.LineFailed if this side fails, and Timeout. A
    call that sends or waits for tensors before `welcome`, or `wait_for_welcome`, raises
    session.LocalProtocolError.
    """

    def __init__(
        self,
        session: session_lib.Session,
        cluster: str,
        *,
        reconnect_timeout: float,
        line: wan.Line,
        log: Callable[[str], None],
        dial: Callable[[float], greeting.Connected] | None = None,
        work: activity.Work | None = None,
    ) -> None:
        """Makes a link of a session whose peer's Hello has come, not connected yet.

        `cluster` is the name of this side; for the rest see `bridge.connect`, and
        `driver.Driver` for `dial`.
        """
        self.session_id = session.session_id
        self.work = work or activity.Work()  # the work of this process
        self._session, self._name = session, cluster
        self._queue = receive_queue.ReceiveQueue()
        session.trace = self.trace
        session.report = lambda: self.work.report(bool(self._queue.waiting))
        self._driver = driver.Driver(
            session,
            line,
            receive=self._receive,
            has_room=self._queue.has_room,
            dial=dial,
            reconnect_timeout=reconnect_timeout,
            log=log,
        )
        self._formats = agreement.Formats(cluster)
        self.control = receive_queue.ControlMessages()  # the peer's latest ones
        self.waited = 0.0  # seconds that callers spent waiting for the peer or the line
        self.has_begun = False  # True once the peer was welcomed (listener only)
        self.owner = ""  # the DNS names of the peer's certificate; empty without TLS

    # For `bridge` and `listener`.

    def start(self, connected: greeting.Connected) -> None:
        """Takes over the connection on which the peer's Hello came."""
        self.owner = connected.owner
        self._driver.start(connected.sock)

    def attach(
        self, connected: greeting.Connected, opening: frames.Open, acknowledged: int
    ) -> None:
        """Takes a connection on which the connector has come back (listener only).

        Raises session.SessionOver, session.RemoteProtocolError if the session cannot go
        on with it.
        """
        if connected.owner != self.owner:
            raise session_lib.RemoteProtocolError(
                f"{self.peer.cluster} came back with another certificate"
            )
        self._driver.attach(connected, opening, acknowledged)

    def give_up(self, reason: str, may_return: bool = False) -> None:
        """Ends the session as if the peer had stayed away for too long, or once it has.

        `may_return` is True if the peer may come back in time.
        """
        self._driver.give_up(reason, may_return)

    @property
    def is_away(self) -> bool:
        """True if there is no connection to the peer at present."""
        return self._driver.is_away

    @property
    def was_lost(self) -> bool:
        """True if the session ended because the peer did not come back."""
        return self._driver.was_lost

    # What experiments use.

    @property
    def trace(self) -> trace_lib.Trace:
        """The trace of this process."""
        return self.work.trace

    @property
    def is_over(self) -> bool:
        """True if the session has ended, well or not."""
        return self._driver.is_dead

    @property
    def peer(self) -> frames.Hello:
        """The other side's Hello."""
        assert self._session.hello is not None  # it had come before there was a link
        return self._session.hello

    @property
    def ledger(self) -> dict[str, list[int]]:
        """The byte ledger: `sent Hello`, `received tokens` -> [frames, bytes]."""
        return self._session.ledger.entries()

    def bytes_moved(self, direction: str) -> int:
        """Returns all bytes `sent` or `received` so far, below TLS and TCP."""
        return self._session.ledger.bytes_moved(direction)

    @property
    def outages(self) -> dict[str, float]:
        """The times that the line was down, and the most that waited for it then."""
        window, policy = self._session.window, self._driver.connection.reconnect
        return {
            "count": policy.outages,
            "seconds": policy.seconds,
            "tensors": window.most_tensors,
            "bytes": window.most_bytes,
        }

    @property
    def traffic(self) -> dict[str, int]:
        """The bytes on the line, as this side and as the kernel counts them."""
        return self._driver.connection.traffic

    @property
    def round_trip(self) -> float:
        """The seconds to the next machine and back, as the kernel measures them.

        In a federation that is the organization's own switch. An emulated line's delay
        is not among them; 0 without a connection.
        """
        return self._driver.connection.round_trip

    def sender(
        self, name: str, spec: codec_lib.Spec, codec: selector.CodecOrSelector
    ) -> channels.Sender:
        """Opens a channel to the peer; see `channels.Carrier`."""
        self._formats.check_open(name)
        number = self._session.add_sender(name)
        made = channels.Sender(self, number, name, spec, codec)
        self._formats.sent.append(made.format)
        return made

    def receiver(
        self,
        name: str,
        spec: codec_lib.Spec,
        codec: selector.CodecOrSelector,
        sharding: Any = None,
        check: channels.Check | None = None,
    ) -> channels.Receiver:
        """Opens the receiving end of the peer's next channel.

        All channels are to be opened before `welcome` is called, or `wait_for_welcome`:
        then they are compared with the peer's, and only then read from. Later ones
        raise session.LocalProtocolError. `sharding` of the received arrays is a tree
        like `spec`, or one for all; `check` raises ValueError at arrays that must not
        be returned.
        """
        self._formats.check_open(name)
        channel = len(self._formats.received)
        made = channels.Receiver(self, channel, name, spec, codec, sharding, check)
        sizes = made.format.buffer_sizes()
        self._session.add_receiver(name, sizes, is_compressed=codec.zstd is not None)
        self._queue.add_channel()
        self._formats.received.append(made.format)
        return made

    def welcome(self, step: int) -> None:
        """Lets the run begin, or resume after `step` (listener only)."""
        self.has_begun = True
        described = self._formats.encoded()
        self._driver.enqueue(frames.Welcome(step, described), len(described))

    def wait_for_welcome(self, timeout: float) -> int:
        """Waits for all clusters; returns the step to resume after (connector only).

        Raises agreement.Mismatch if the listener's channels are not this side's.
        """
        what = "the other clusters"
        self._wait(lambda: self.control.welcome is not None, what, timeout=timeout)
        self._formats.compare(self.control.formats, self.peer.cluster)
        self._driver.channels_ready()
        assert self.control.welcome is not None  # the wait was for this
        return self.control.welcome

    def step_done(self, step: int) -> None:
        """Sends the step token of `step` (listener only)."""
        self._driver.enqueue(frames.StepDone(step))

    def wait_for_step(self, step: int) -> None:
        """Waits for the step token of `step` or a later one."""
        self._session.check_open()
        self._wait(lambda: self.control.step_done >= step, f"the token of step {step}")

    def stop(self, step: int = 0) -> None:
        """Names the run's last step; a connector only requests its end, with 0."""
        self._driver.enqueue(frames.Stop(step))

    @property
    def stop_step(self) -> int | None:
        """The step of the peer's last Stop, if any."""
        return self.control.stop

    def close(self) -> None:
        """Sends End, waits for the peer's, and closes. Nothing queued is lost."""
        self._queue.is_closed = True  # what comes is read and dropped
        if self._session.is_paused:
            self._driver.channels_ready()
        self._driver.enqueue(frames.End())
        with self.waiting("the end of the session") as waiting:
            while not self._driver.is_dead:
                try:
                    self._check_lost()
                    waiting.check()
                except errors.NebulaError as error:
                    self.abort(str(error))
                    raise
                pause = min(waiting.pause(), LOOK_SECONDS)
                self._driver.wait(lambda: False, pause, past_end=True)
        self._driver.join()
        self._driver.check()

    def abort(self, reason: str) -> None:
        """Sends the reason for giving up to the peer, and closes."""
        self._driver.abort(reason)

    def __enter__(self) -> "Link":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is None:
            self.close()
        else:
            self.abort(errors.reason(error))

    # For channels.

    def put_tensor(self, message: frames.Tensor) -> None:
        """Queues a tensor; blocks while too much is not acknowledged."""
        self._session.check_open()
        if message.is_end:  # so small that it need not wait for room
            self._driver.enqueue(message, frames.IDENTITY_BYTES)
            return
        if self._formats.sent[message.channel].zstd is not None:
            message = message._replace(buffers=zstd_lib.with_table(message.buffers))
        window, size = self._session.window, frames.tensor_bytes(message)
        if not window.has_room(size):
            self._wait(lambda: window.has_room(size), "room to send", STUCK_SECONDS)
        self._driver.enqueue(message, size)

    def take_tensor(self, channel: int, what: str = "a tensor") -> frames.Tensor:
        """Waits for the next tensor of a channel; `what` names it in errors."""
        self._session.check_open()
        if self._queue.next(channel) is None:
            self._wait(lambda: self._queue.next(channel), what)
        message = self._queue.take(channel)
        self._driver.notify_space()
        return message

    def arrived(self, channel: int) -> frames.Tensor | None:
        """Returns what `take_tensor` would return at once; None if it would wait."""
        return self._queue.next(channel)

    # For a hub, which must not wait for one cluster of many.

    def reserve(self, nbytes: int) -> None:
        """Lets so many bytes wait in memory to be sent; before the run begins."""
        self._session.window.reserved = nbytes

    def has_room(self, nbytes: int, tensors: int = 1) -> bool:
        """Returns True if so many tensors, of `nbytes` together, can be sent now."""
        return self._session.window.has_room(nbytes, tensors)

    def wait_for_any(self, what: str) -> bool:
        """Waits for a tensor of any channel; returns False if none comes any more."""
        self._wait(lambda: self._queue.tensors or self.control.has_ended, what)
        return bool(self._queue.tensors)

    def _wait(
        self,
        predicate: Callable[[], Any],
        what: str,
        most_seconds: float = 0.0,
        timeout: float | None = None,
    ) -> None:
        """Waits until `predicate` holds; raises after `most_seconds` without room."""
        if predicate():
            return
        with self.waiting(what) as waiting:
            while not self._driver.wait(
                predicate, min(waiting.pause(timeout), LOOK_SECONDS)
            ):
                self.check(what)
                self._check_lost()
                if timeout is None:
                    waiting.check()
                elif waiting.seconds >= timeout:
                    text = f"waited {timeout:g} s for {what} (connect_timeout)"
                    raise Timeout(f"{self._session.peer}: {text}")
                if not self._queue.has_room():
                    if waiting.seconds > most_seconds:
                        raise session_lib.RemoteProtocolError(
                            f"{self._session.peer} sent {self._queue.tensors} tensors"
                            f" that nobody waits for, while we wait for {what}"
                        )
                    time.sleep(RECHECK_SECONDS)

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[stuck_peers.Wait]:
        """Reports to the peers that this process waits, and counts for how long."""
        peer, watch = self._session.peer, self._session.watch
        waiting = stuck_peers.Wait(self._name, what, peer, watch, self.work)
        self._queue.waiting.append(what)
        self.work.waiting.append(what)
        try:
            with self.trace.span("wait", what=what):
                yield waiting
        finally:
            self._queue.waiting.remove(what)
            self.work.waiting.remove(what)
            self.waited += waiting.seconds

    def _check_lost(self) -> None:
        """Lets a process that is to stop end its wait for a peer that is lost."""
        lost = self._driver.connection.reconnect
        if time.monotonic() >= lost.deadline(LOST_SECONDS):
            self.work.on_lost(self._session.peer)

    def check(self, what: str) -> None:
        """Raises the reason if nothing more can come; `what` is due."""
        self._driver.check()
        peer = self._session.peer
        if self.control.has_ended:
            raise session_lib.RemoteProtocolError(f"{peer} sent End while more was due")
        if self._driver.is_dead:
            text = f"the session with {peer} was ended while we waited for {what}"
            raise session_lib.SessionOver(text)

    # For the driver.

    def _receive(self, message: frames.Message) -> None:
        if isinstance(message, frames.Tensor):
            self._queue.put(message)
        else:
            self.control.take(message)
