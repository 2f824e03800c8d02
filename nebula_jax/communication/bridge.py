"""THE cross-cluster boundary: sockets, one thread per peer, channels of tensors.

    with bridge.connect(address, hello, ...) as link:
        tokens = link.sender("tokens", spec, codecs.pack_ids(vocab_size))
        step = link.wait_for_welcome()
        tokens.send(step + 1, arrays)      # encode on device -> frames -> socket
        link.wait_for_step(step + 1)

A Link owns its socket in a thread of its own (an SSL object bears no two threads): the
main thread computes while bytes come and go. Both ends keep memory bounded: `send`
blocks when MAX_UNSENT tensors wait to leave, and the socket is not read while
MAX_UNREAD wait to be used, so that TCP holds the sender back.
"""

import collections
import contextlib
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from nebula_jax import errors
from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication import frames, protocol, wan
from nebula_jax.security import tls as tls_lib

MAX_UNSENT = 2  # tensors: one on the line, one behind it
MAX_UNREAD = 4  # tensors: enough that the line never waits for the reader
MAX_UNREAD_WHILE_WAITING = 64  # a peer that floods one channel while another is due
SEND_BYTES = 1 << 18  # per call: large enough for full speed, small enough to stay fair
HANDSHAKE_SECONDS = 5.0  # an accepted connection says Hello within this, or is dropped
GOODBYE_SECONDS = 5.0  # to deliver an Abort before the socket is closed
LINGER_SECONDS = 1.0  # for the peer to read our last words before the socket is gone
RETRY_SECONDS = 0.2  # between attempts to connect


class ConnectError(errors.NebulaError):
    """No usable connection came about."""


class Mismatch(errors.NebulaError):
    """Two clusters do not agree on what they are about to do."""


def check_agreement(ours: frames.Hello, theirs: frames.Hello) -> None:
    """Raises Mismatch, in words, unless both clusters run the same thing."""
    if ours.version != theirs.version:
        raise Mismatch(
            f"{theirs.cluster} runs nebula_jax {theirs.version},"
            f" {ours.cluster} {ours.version}"
        )
    for name in sorted(ours.settings.keys() | theirs.settings.keys()):
        mine, other = ours.settings.get(name), theirs.settings.get(name)
        if mine != other:
            raise Mismatch(
                f"{theirs.cluster} has {name}={_brief(other)},"
                f" {ours.cluster} has {name}={_brief(mine)}"
            )


def _brief(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def connect(
    address: tuple[str, int],
    hello: frames.Hello,
    *,
    connect_timeout: float,
    peer_timeout: float,
    peer: str,
    tls: ssl.SSLContext | None = None,
    line: wan.Line = wan.UNSHAPED,
) -> "Link":
    """Comes to a listening cluster.

    Args:
      address: host and port.
      hello: this side's.
      connect_timeout: seconds to keep trying for.
      peer_timeout: seconds of silence after which the peer counts as gone.
      peer: the name that the listener's certificate must carry.
      tls: client context, or None for plain TCP.
      line: what to emulate.

    Returns:
      A link whose peer has said a Hello that agrees with ours.

    Raises:
      ConnectError: if nobody answers, or TLS fails.
      Mismatch: if the peer runs something else.
    """
    deadline = time.monotonic() + connect_timeout
    where = f"{address[0]}:{address[1]}"
    while True:
        try:
            sock = socket.create_connection(address, timeout=connect_timeout)
            break
        except OSError as error:
            if time.monotonic() + RETRY_SECONDS > deadline:
                raise ConnectError(
                    f"nobody answers at {where} after {connect_timeout:g} s"
                    f" (--connect_timeout): {error.strerror or error}"
                ) from None
            time.sleep(RETRY_SECONDS)
    try:
        sock.settimeout(max(RETRY_SECONDS, deadline - time.monotonic()))
        if tls is not None:
            sock = tls.wrap_socket(sock, server_hostname=peer)
    except (OSError, ssl.CertificateError) as error:
        sock.close()
        raise ConnectError(f"no TLS with {peer} at {where}: {error}") from None
    remaining = max(RETRY_SECONDS, deadline - time.monotonic())
    return _met(
        Link(sock, protocol.Role.CONNECTOR, hello, peer_timeout, line), remaining
    )


def accept(
    listening: socket.socket,
    hello: frames.Hello,
    *,
    timeout: float,
    peer_timeout: float,
    tls: Callable[[], ssl.SSLContext] | None = None,
    line: wan.Line = wan.UNSHAPED,
    log: Callable[[str], None] = print,
) -> "Link":
    """Waits for a cluster to come.

    A stranger who does not speak the protocol is dropped, and waiting goes on.

    Args:
      listening: bound and listening socket.
      hello: this side's.
      timeout: seconds to wait.
      peer_timeout: seconds of silence after which the peer counts as gone.
      tls: makes a fresh server context per connection (a context kept for several
        would let a revoked peer resume its session), or None for plain TCP.
      line: what to emulate.
      log: told about dropped strangers.

    Returns:
      A link whose peer has said a Hello that agrees with ours.

    Raises:
      ConnectError: if nobody came in time.
      Mismatch: if the peer runs something else.
    """
    deadline = time.monotonic() + timeout
    while True:
        listening.settimeout(max(0.0, deadline - time.monotonic()) or 1e-3)
        try:
            sock, address = listening.accept()
        except TimeoutError:
            raise ConnectError(
                f"nobody came within {timeout:g} s (--connect_timeout)"
            ) from None
        try:
            sock.settimeout(HANDSHAKE_SECONDS)
            if tls is not None:
                sock = tls().wrap_socket(sock, server_side=True)
            link = Link(sock, protocol.Role.LISTENER, hello, peer_timeout, line)
            return _met(link, HANDSHAKE_SECONDS)
        except Mismatch:
            raise
        except (OSError, errors.NebulaError) as error:
            sock.close()
            log(f"dropped a connection from {address[0]}: {error}")


def _met(link: "Link", timeout: float) -> "Link":
    try:
        link.wait_for_hello(timeout)
        _check_certificate(link)
    except errors.NebulaError as error:
        link.abort(str(error))
        raise
    return link


def _certificate_names(sock: socket.socket) -> set[str]:
    if not isinstance(sock, ssl.SSLSocket):
        return set()
    names = sock.getpeercert().get("subjectAltName", ())
    return {value for kind, value in names if kind == "DNS"}


def _check_certificate(link: "Link") -> None:
    """With TLS, a cluster may only speak under the name its certificate carries."""
    names = link.certificate_names
    if names and tls_lib.certificate_name(link.peer.cluster) not in names:
        raise Mismatch(
            f"{link.peer.cluster} shows a certificate for {', '.join(sorted(names))}"
        )


class Link:
    """One conversation with another cluster. Made by `connect` and `accept`."""

    def __init__(
        self,
        sock: socket.socket,
        role: protocol.Role,
        hello: frames.Hello,
        peer_timeout: float,
        line: wan.Line,
    ):
        self._socket = sock
        self._hello = hello
        self._connection = protocol.Connection(role, peer_timeout, time.monotonic())
        self._peer_timeout = peer_timeout
        self._shaper = wan.Shaper(line)
        self._changed = threading.Condition()  # guards all that follows
        self._outbox: collections.deque[frames.Message] = collections.deque([hello])
        self._inbox: dict[int, collections.deque[frames.Tensor]] = {}
        self._senders = 0
        self._peer_hello: frames.Hello | None = None
        self._welcome: int | None = None
        self._stop: int | None = None
        self._step_done = 0
        self._waiting_for_tensor = False
        self._closing = self._aborted = self._at_eof = False
        self._error: Exception | None = None
        self.waited = 0.0
        """Seconds that the main thread spent waiting for the peer or the line."""
        self.certificate_names = _certificate_names(sock)
        """DNS names of the peer's certificate; empty without TLS."""

        sock.setblocking(False)
        _no_delay(sock)
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="bridge", daemon=True)
        self._thread.start()

    # What experiments use.

    @property
    def peer(self) -> frames.Hello:
        """The other side's Hello."""
        assert self._peer_hello is not None
        return self._peer_hello

    @property
    def ledger(self) -> dict[str, list[int]]:
        """`sent Tensor[0]` and so on -> [frames, bytes], heads included."""
        with self._changed:
            return {
                kind: list(entry) for kind, entry in self._connection.ledger.items()
            }

    def bytes_moved(self, direction: str) -> int:
        """All bytes `sent` or `received` so far, below TLS and TCP."""
        ledger = self.ledger
        return sum(ledger[kind][1] for kind in ledger if kind.startswith(direction))

    def wait_for_hello(self, timeout: float) -> None:
        """Waits until the peer has said who it is; checks that it agrees with us."""
        self._wait(lambda: self._peer_hello is not None, timeout, "a Hello")
        check_agreement(self._hello, self.peer)

    def sender(self, name: str, spec: codec_lib.Spec, codec: codec_lib.Codec):
        """A channel for arrays like `spec`; both ends add theirs in the same order."""
        with self._changed:
            self._senders += 1
            return Sender(self, self._senders - 1, name, spec, codec)

    def receiver(
        self, name: str, spec: codec_lib.Spec, codec: codec_lib.Codec, sharding=None
    ):
        """The other end of the peer's next channel; to be added before the Welcome.

        `sharding` is where received arrays go (a tree like `spec`, or one for all).
        """
        payload = codec_lib.payload_spec(codec, spec)
        sizes = [codec_lib.nbytes(leaf) for leaf in jax.tree.leaves(payload)]
        with self._changed:
            channel = self._connection.add_channel(sizes)
            self._inbox[channel] = collections.deque()
        return Receiver(self, channel, name, spec, codec, sharding)

    def welcome(self, step: int) -> None:
        """Listener: tells the peer after which step the run goes on."""
        self._put(frames.Welcome(step))

    def wait_for_welcome(self, timeout: float) -> int:
        """Connector: waits for all clusters to be there; the step to go on after."""
        self._wait(lambda: self._welcome is not None, timeout, "the other clusters")
        return self._welcome

    def step_done(self, step: int) -> None:
        """Listener: sends the step token of `step`."""
        self._put(frames.StepDone(step))

    def wait_for_step(self, step: int) -> None:
        """Waits for the step token of `step` or a later one."""
        self._wait(lambda: self._step_done >= step)

    def stop(self, step: int = 0) -> None:
        """Listener: the run ends after `step`. Connector: asks for that, with 0."""
        self._put(frames.Stop(step))

    @property
    def stop_step(self) -> int | None:
        """What the peer said about stopping, if anything."""
        with self._changed:
            return self._stop

    def close(self) -> None:
        """Says End, waits for the peer's, and closes. Nothing queued is lost."""
        self._put(frames.End())
        with self._changed:
            self._closing = True
        self._wake()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def abort(self, reason: str) -> None:
        """Tells the peer why this side gives up, and closes."""
        with self._changed:
            self._outbox.clear()
            self._outbox.append(frames.Abort(reason))
            self._closing = True
        self._wake()
        self._thread.join(GOODBYE_SECONDS)

    def __enter__(self) -> "Link":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if error is None:
            self.close()
        else:
            self.abort(str(error) or kind.__name__)

    # The main thread's half.

    def _put(self, message: frames.Message) -> None:
        with self._changed:
            if self._error is not None:
                raise self._error
            self._outbox.append(message)
        self._wake()

    def _put_tensor(self, message: frames.Tensor) -> None:
        self._wait(lambda: self._unsent() < MAX_UNSENT)
        self._put(message)

    def _unsent(self) -> int:
        return sum(isinstance(message, frames.Tensor) for message in self._outbox)

    def _take_tensor(self, channel: int) -> frames.Tensor:
        inbox = self._inbox[channel]
        with self._changed:
            self._waiting_for_tensor = True
        self._wake()
        try:
            self._wait(lambda: bool(inbox))
        finally:
            with self._changed:
                self._waiting_for_tensor = False
        with self._changed:
            message = inbox.popleft()
        self._wake()  # there may be room to read again
        return message

    def _wait(self, predicate, timeout: float | None = None, what: str = "") -> None:
        start = time.monotonic()
        with self._changed:
            there = self._changed.wait_for(
                lambda: predicate() or self._error is not None, timeout
            )
            self.waited += time.monotonic() - start
            if predicate():
                return
            if self._error is not None:
                raise self._error
        if not there:
            raise ConnectError(
                f"{self._connection.peer}: waited {timeout:g} s for {what}"
                " (--connect_timeout)"
            )

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # the thread has ended; _error says why
            self._wake_out.send(b"\0")

    # The thread's half.

    def _run(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._wake_in, selectors.EVENT_READ)
                selector.register(self._socket, selectors.EVENT_READ)
                while self._turn(selector):
                    pass
        except (errors.NebulaError, ssl.SSLError, OSError) as error:
            self._fail(error)
        finally:
            if self._aborted or self._error is not None:
                _linger(self._socket)
            self._socket.close()
            self._wake_in.close()
            self._wake_out.close()
            with self._changed:
                if self._error is None and not self._closing:
                    self._error = protocol.PeerGone(f"{self._connection.peer} ended")
                self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        if not isinstance(error, errors.NebulaError):
            error = protocol.PeerGone(
                f"lost the connection to {self._connection.peer}: {error}"
            )
        if isinstance(error, protocol.RemoteProtocolError):
            self._try_to_say(frames.Abort(str(error)))
        with self._changed:
            self._error = self._error or error

    def _try_to_say(self, message: frames.Message) -> None:
        try:
            for buffer in self._connection.send(message, time.monotonic()):
                self._socket.send(buffer)
        except (errors.NebulaError, OSError):
            pass

    def _turn(self, selector: selectors.BaseSelector) -> bool:
        """Moves what can be moved, then sleeps until something changes."""
        now = time.monotonic()
        self._fill_shaper(now)
        blocked = self._write(now)
        with self._changed:
            reading = self._wants_to_read() and not self._at_eof
        if reading:
            self._read(now)
        else:
            self._connection.not_reading(now)
        with self._changed:
            done = self._closing and not self._outbox and self._shaper.empty
        ended = self._connection.remote_state is protocol.State.ENDED
        if done and (ended or self._aborted):
            return False
        for buffer in self._connection.tick(now):
            self._shaper.put(buffer, now)

        waits = [self._connection.next_tick(now)]
        if not blocked and (wait := self._shaper.wait(now)) is not None:
            waits.append(wait)
        events = selectors.EVENT_READ if reading and not self._at_eof else 0
        events |= selectors.EVENT_WRITE if blocked else 0
        _watch(selector, self._socket, events)
        for key, _ in selector.select(min(waits)):
            if key.fileobj is self._wake_in:
                self._drain_wakes()
        return True

    def _drain_wakes(self) -> None:
        try:
            while self._wake_in.recv(4096):
                pass
        except BlockingIOError:
            pass

    def _fill_shaper(self, now: float) -> None:
        while self._shaper.ready(now):
            with self._changed:
                if not self._outbox:
                    return
                message = self._outbox.popleft()
                buffers = self._connection.send(message, now)
                self._changed.notify_all()
            self._aborted |= isinstance(message, frames.Abort)
            for buffer in buffers:
                self._shaper.put(buffer, now)

    def _write(self, now: float) -> bool:
        """Writes what is due; True if the socket takes no more at present."""
        while (view := self._shaper.due(now)) is not None:
            if not len(view):
                self._shaper.wrote(0)
                continue
            try:
                self._shaper.wrote(self._socket.send(view[:SEND_BYTES]))
            except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                return True
            self._fill_shaper(now)
        return False

    def _wants_to_read(self) -> bool:
        limit = MAX_UNREAD_WHILE_WAITING if self._waiting_for_tensor else MAX_UNREAD
        return sum(len(inbox) for inbox in self._inbox.values()) < limit

    def _read(self, now: float) -> None:
        while True:
            try:
                count = self._socket.recv_into(self._connection.get_buffer())
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return
            if count == 0:
                self._connection.receive_eof()
                self._at_eof = True
                return
            self._connection.buffer_updated(count, now)
            with self._changed:
                while (message := self._connection.next_event()) is not None:
                    self._receive(message)
                self._changed.notify_all()
                if not self._wants_to_read():
                    return

    def _receive(self, message: frames.Message) -> None:
        match message:
            case frames.Tensor(channel=channel):
                self._inbox[channel].append(message)
            case frames.StepDone(step=step):
                self._step_done = max(self._step_done, step)
            case frames.Stop(step=step):
                self._stop = step
            case frames.Hello():
                self._peer_hello = message
            case frames.Welcome(step=step):
                self._welcome = step
                self._step_done = step
            case frames.Abort(reason=reason):
                raise protocol.PeerAborted(f"{self._connection.peer} gave up: {reason}")


class Sender:
    """The near end of a channel."""

    def __init__(self, link, channel, name, spec, codec):
        self.name = name
        self._link, self._channel, self._spec = link, channel, spec
        self._encode = jax.jit(codec.encode)
        self.state = codec.init(spec)

    def send(self, step: int, arrays: Any, micro_batch: int = 0) -> None:
        """Encodes on the device and queues the bytes; blocks while too much waits.

        Args:
          step: optimisation step, part of the tag that the receiver checks.
          arrays: pytree of the channel's spec.
          micro_batch: the rest of the tag.
        """
        payload, self.state = self._encode(arrays, self.state)
        buffers = [np.asarray(leaf) for leaf in jax.tree.leaves(payload)]
        self._link._put_tensor(frames.Tensor(self._channel, step, micro_batch, buffers))


class Receiver:
    """The far end of a channel."""

    def __init__(self, link, channel, name, spec, codec, sharding):
        self.name = name
        self._link, self._channel, self._sharding = link, channel, sharding
        payload = codec_lib.payload_spec(codec, spec)
        self._leaves, self._structure = jax.tree.flatten(payload)
        self._decode = jax.jit(codec.decode, out_shardings=(sharding, None))
        self.state = codec.init(spec)

    def recv(self, step: int, micro_batch: int = 0) -> Any:
        """Waits for the tensor with this tag and decodes it on the device.

        Raises:
          protocol.RemoteProtocolError: if another one comes.
        """
        message = self._link._take_tensor(self._channel)
        if (message.step, message.micro_batch) != (step, micro_batch):
            raise protocol.RemoteProtocolError(
                f"{self._link.peer.cluster} sent {self.name} for step {message.step},"
                f" micro-batch {message.micro_batch}; expected step {step},"
                f" micro-batch {micro_batch}"
            )
        leaves = [
            buffer.view(leaf.dtype).reshape(leaf.shape)
            for buffer, leaf in zip(message.buffers, self._leaves, strict=True)
        ]
        payload = jax.tree.unflatten(self._structure, leaves)
        arrays, self.state = self._decode(payload, self.state)
        return arrays


def listen(address: tuple[str, int]) -> socket.socket:
    """A bound and listening socket.

    Raises:
      ConnectError: if the port is in use, or the host is not one of this machine.
    """
    try:
        return socket.create_server(address, reuse_port=False)
    except OSError as error:
        raise ConnectError(
            f"cannot listen on {address[0]}:{address[1]}: {error.strerror or error}"
        ) from None


def _linger(sock: socket.socket) -> None:
    """Lets the peer read our last words: unread bytes here would reset them away."""
    try:
        sock.shutdown(socket.SHUT_WR)
        sock.settimeout(LINGER_SECONDS)
        deadline = time.monotonic() + LINGER_SECONDS
        while sock.recv(1 << 16) and time.monotonic() < deadline:
            pass
    except (OSError, ValueError):
        pass


def _watch(selector: selectors.BaseSelector, sock: socket.socket, events: int) -> None:
    if not events:
        if sock in selector.get_map():
            selector.unregister(sock)
    elif sock not in selector.get_map():
        selector.register(sock, events)
    elif selector.get_key(sock).events != events:
        selector.modify(sock, events)


def _no_delay(sock: socket.socket) -> None:
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
