"""One conversation with another cluster, as experiments see it.

A link lives as long as its session, over as many connections as the line allows: see
`protocol` for what is said, `pump` for how it moves. Both ends keep memory bounded:
`send` blocks while the peer has not taken what was sent before, and the socket is not
read while enough waits to be used, so that TCP holds the sender back.
"""

import collections
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from nebula_jax import errors
from nebula_jax.communication import channels, selector, wan
from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication.wire import driver, frames
from nebula_jax.communication.wire import session as protocol
from nebula_jax.communication.wire import zstd as zstd_lib

SESSION_BYTES = 16
MAX_UNREAD = 4  # tensors: enough that the line never waits for the reader,
MAX_UNREAD_BYTES = 1 << 20  # or more of them if they are small together
FLOOD_BYTES = 64 << 20  # unread while we wait for something else: too much
TENSOR_OVERHEAD = 512  # bytes of memory that a tensor takes besides its buffers
STUCK_SECONDS = 60.0  # that both sides send, and neither takes


class Timeout(errors.NebulaError):
    """The peer did not say what was due within --connect_timeout."""


class Link:
    """One conversation with another cluster; `bridge` makes them."""

    def __init__(
        self,
        role: protocol.Role,
        hello: frames.Hello,
        *,
        session: bytes | None = None,
        peer_timeout: float,
        reconnect_timeout: float,
        line: wan.Line,
        log: Callable[[str], None],
        dial: Callable[[], socket.socket] | None = None,
    ):
        self.session = session or secrets.token_bytes(SESSION_BYTES)
        self._connection = protocol.Connection(role, self.session, peer_timeout)
        self._pump = driver.Pump(
            self._connection,
            line,
            receive=self._receive,
            has_room=self._has_room,
            dial=dial,
            reconnect_timeout=reconnect_timeout,
            log=log,
        )
        self._inbox: dict[int, collections.deque[frames.Tensor]] = {}
        self._count = threading.Lock()  # guards the two below
        self._unread = self._unread_bytes = 0
        self._senders = 0
        self._compressed: set[int] = set()  # channels whose tensors have a table
        self._peer_hello: frames.Hello | None = None
        self._welcome: int | None = None
        self._stop: int | None = None
        self._step_done = 0
        self._is_closing = self._has_peer_ended = False
        self._waiting: list[str] = []  # for what; one entry per caller who waits
        self.waited = 0.0
        """Seconds that the main thread spent waiting for the peer or the line."""
        self.certificate_names: set[str] | None = None
        """DNS names of the peer's certificate; None without TLS."""
        self._pump.connection.send(hello)

    # How it gets its connections. For `bridge`.

    def start(self, sock: socket.socket) -> None:
        """Connector: speaks on a connected socket."""
        self.certificate_names = certificate_names(sock)
        self._pump.start(sock)

    def attach(self, sock: socket.socket, opening: frames.Open, taken: int) -> None:
        """Listener: the connector has come (again), and said `opening`.

        Raises:
          protocol.RemoteProtocolError: if the session cannot go on with it.
        """
        names = certificate_names(sock)
        if self._peer_hello is not None and names != self.certificate_names:
            raise protocol.RemoteProtocolError(
                f"{self.peer.cluster} came back with another certificate"
            )
        self.certificate_names = names
        self._pump.attach(sock, opening, taken)

    # What experiments use.

    @property
    def is_over(self) -> bool:
        """Whether the session has ended, well or not."""
        return self._pump.is_dead

    @property
    def peer(self) -> frames.Hello:
        """The other side's Hello."""
        assert self._peer_hello is not None
        return self._peer_hello

    @property
    def ledger(self) -> dict[str, list[int]]:
        """`sent Tensor[0]` and so on -> [frames, bytes], heads included."""
        return self._connection.ledger

    def bytes_moved(self, direction: str) -> int:
        """All bytes `sent` or `received` so far, below TLS and TCP."""
        ledger = self.ledger
        return sum(ledger[kind][1] for kind in ledger if kind.startswith(direction))

    def wait_for_hello(self, timeout: float) -> None:
        """Waits until the peer has said who it is."""
        self._wait(lambda: self._peer_hello is not None, "a Hello", timeout=timeout)

    def sender(
        self,
        name: str,
        spec: codec_lib.Spec,
        codec: selector.CodecOrSelector,
        zstd: int | None = None,
    ) -> channels.Sender:
        """Opens a channel for arrays like `spec`; both ends in the same order.

        Args:
          name: for error messages.
          spec: of the arrays.
          codec: that encodes them on the device.
          zstd: level at which the payload's bytes are compressed, 1 to 19; None: not.
        """
        channel = self._senders
        self._senders += 1
        if zstd is not None:
            self._compressed.add(channel)
        return channels.Sender(self, channel, name, spec, codec, zstd)

    def receiver(
        self,
        name: str,
        spec: codec_lib.Spec,
        codec: selector.CodecOrSelector,
        zstd: int | None = None,
        sharding: Any = None,
    ) -> channels.Receiver:
        """Opens the receiving end of the peer's next channel.

        To be opened before `welcome` is called, or `wait_for_welcome`: until then
        nothing that comes after a Welcome is read.

        Args:
          name, spec, codec, zstd: as the peer's `sender`.
          sharding: of the received arrays (a tree like `spec`, or one for all).
        """
        payloads = [
            jax.tree.leaves(codec_lib.payload_spec(each, spec))
            for each in selector.variants(codec)
        ]
        channel = self._connection.add_channel(
            [[codec_lib.nbytes(leaf) for leaf in payload] for payload in payloads],
            is_compressed=zstd is not None,
        )
        self._inbox[channel] = collections.deque()
        return channels.Receiver(self, channel, name, spec, codec, zstd, sharding)

    def welcome(self, step: int) -> None:
        """Listener: tells the peer after which step the run goes on."""
        self._pump.say(frames.Welcome(step))

    def wait_for_welcome(self, timeout: float) -> int:
        """Connector: waits for all clusters to be there; the step to go on after."""
        what = "the other clusters"
        self._wait(lambda: self._welcome is not None, what, timeout=timeout)
        self._pump.all_planned()
        return self._welcome

    def step_done(self, step: int) -> None:
        """Listener: sends the step token of `step`."""
        self._pump.say(frames.StepDone(step))

    def wait_for_step(self, step: int) -> None:
        """Waits for the step token of `step` or a later one."""
        self._wait(lambda: self._step_done >= step, f"the end of step {step}")

    def stop(self, step: int = 0) -> None:
        """Listener: the run ends after `step`. Connector: asks for that, with 0."""
        self._pump.say(frames.Stop(step))

    @property
    def stop_step(self) -> int | None:
        """What the peer said about stopping, if anything."""
        return self._stop

    def close(self) -> None:
        """Says End, waits for the peer's, and closes. Nothing queued is lost."""
        self._is_closing = True  # nobody will ask for more: it is read and dropped
        if self._connection.is_paused:
            self._pump.all_planned()
        self._pump.say(frames.End())
        self._pump.wait(lambda: False, past_end=True)  # for the session to be over
        self._pump.join()
        self._pump.check()

    def abort(self, reason: str) -> None:
        """Tells the peer why this side gives up, and closes."""
        self._pump.abort(reason)

    def __enter__(self) -> "Link":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if error is None:
            self.close()
        else:
            self.abort(str(error) or kind.__name__)

    # For channels.

    def put_tensor(self, message: frames.Tensor) -> None:
        """Queues a tensor; blocks while the peer has too much to take."""
        if message.channel in self._compressed:
            message = message._replace(buffers=zstd_lib.with_table(message.buffers))
        if not self._pump.has_window:
            patience = STUCK_SECONDS
            self._wait(lambda: self._pump.has_window, "room for ours", patience)
        self._pump.say(message, frames.tensor_bytes(message))

    def take_tensor(self, channel: int) -> frames.Tensor:
        """The next tensor of a channel; waits for it.

        Raises:
          protocol.RemoteProtocolError: if the peer ends, or floods other channels.
        """
        inbox = self._inbox[channel]
        if not inbox:
            self._wait(inbox.__len__, f"one on channel {channel}")
        message = inbox.popleft()
        self._count_unread(-1, message)
        self._pump.room_was_made()
        return message

    def has_tensor(self, channel: int) -> bool:
        """Whether `take_tensor` would return at once."""
        return bool(self._inbox[channel])

    def _wait(
        self,
        predicate: Callable[[], Any],
        what: str,
        patience: float = 0.0,
        timeout: float | None = None,
    ) -> None:
        """Waits for something that only the peer can bring about.

        Args:
          predicate: true when it is there.
          what: it is, in words.
          patience: seconds without room to read before that is an error.
          timeout: seconds.
        """
        start = time.monotonic()
        self._waiting.append(what)
        try:
            while not self._pump.wait(predicate, timeout):
                self._check(what)
                away = time.monotonic() - start
                if timeout is not None and away >= timeout:
                    raise Timeout(
                        f"{self._connection.peer}: waited {timeout:g} s for {what}"
                        " (--connect_timeout)"
                    )
                if not self._has_room():
                    if away > patience:
                        raise protocol.RemoteProtocolError(
                            f"{self._connection.peer} sent {self._unread} tensors that"
                            f" nobody waits for, while we wait for {what}"
                        )
                    time.sleep(driver.RECHECK_SECONDS)  # another thread may take some
        finally:
            self._waiting.remove(what)
            self.waited += time.monotonic() - start

    def _check(self, what: str) -> None:
        """Raises if nothing more can come."""
        self._pump.check()
        peer = self._connection.peer
        if self._has_peer_ended:
            raise protocol.RemoteProtocolError(f"{peer} said End while more was due")
        if self._pump.is_dead:
            raise protocol.SessionOver(
                f"the session with {peer} was ended while we waited for {what}"
            )

    # For the pump: called by whoever moves bytes.

    def _has_room(self) -> bool:
        if self._is_closing or self._unread < MAX_UNREAD:
            return True
        limit = FLOOD_BYTES if self._waiting else MAX_UNREAD_BYTES
        return self._unread_bytes < limit

    def _count_unread(self, sign: int, message: frames.Tensor) -> None:
        with self._count:
            self._unread += sign
            self._unread_bytes += sign * (
                frames.tensor_bytes(message) + TENSOR_OVERHEAD
            )

    def _receive(self, message: frames.Message) -> None:
        match message:
            case frames.Tensor(channel=channel):
                if not self._is_closing:
                    self._count_unread(1, message)
                    self._inbox[channel].append(message)
            case frames.End():
                self._has_peer_ended = True
            case frames.StepDone(step=step):
                self._step_done = max(self._step_done, step)
            case frames.Stop(step=step):
                self._stop = step
            case frames.Hello():
                self._peer_hello = message
            case frames.Welcome(step=step):
                self._welcome = step
                self._step_done = step


def certificate_names(sock: socket.socket) -> set[str] | None:
    """DNS names of the peer's certificate; None without TLS."""
    if not isinstance(sock, ssl.SSLSocket):
        return None
    names = sock.getpeercert().get("subjectAltName", ())
    return {value for kind, value in names if kind == "DNS"}
