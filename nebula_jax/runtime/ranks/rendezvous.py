"""The rendezvous of the processes of one cluster, before they are one program.

The root waits at the coordinator's address. Every other process comes and describes
itself; once all are there and agree, or somebody is found not to, all get one answer.
The connections stay open: `cluster` watches over them.

A message is a JSON object on a line. P processes; rank 0 is the root.
"""

import contextlib
import dataclasses
import selectors
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from nebula_jax import errors, printable
from nebula_jax.communication import endpoints
from nebula_jax.communication.wire import json_lines

RETRY_SECONDS = 0.2
HELLO_SECONDS = 5.0  # for who has connected to describe itself
MOST_PENDING = 256  # that have not

Message = dict[str, Any]


class Absent(errors.PeerAbsent):
    """A process of a cluster that did not come, or has gone."""


class Line:
    """A connection between two processes of a cluster."""

    def __init__(self, sock: socket.socket) -> None:
        """Takes over a connected socket."""
        self._socket, self._stream = sock, sock.makefile("rb")
        self._sending = threading.Lock()

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message, or drops it if the line is broken: `read` finds that out."""
        with contextlib.suppress(OSError), self._sending:
            self._socket.sendall(json_lines.encode(message))

    def arrives(self, timeout: float) -> bool:
        """Waits for the first message, or the end; returns False if there is none."""
        return bool(_readable([self._socket], timeout))

    def read(self, timeout: float | None = None) -> Message | None:
        """Waits for the next message; None if there will be none."""
        try:
            self._socket.settimeout(timeout)
            line = self._stream.readline(json_lines.MOST_BYTES)
            return json_lines.decode(line) if line.endswith(b"\n") else None
        except (OSError, json_lines.Malformed):
            return None

    def close(self) -> None:
        """Closes it; who reads gets None."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def gather(
    server: socket.socket,
    processes: int,
    described: Mapping[str, Any],
    answer: Mapping[str, Any],
    timeout: float,
) -> tuple[dict[int, Line], Message]:
    """Waits, as the root, for all others; all of them get the same answer.

    Args:
      server: listens at the coordinator's address; is closed.
      processes: P.
      described: what must be equal in all processes, JSON values by name.
      answer: sent to all once they are there.
      timeout: seconds to wait.

    Returns:
      Rank -> line to it; and the answer.

    Raises:
      Absent: if some did not come; names them.
      errors.SettingsError: if they are not the P processes of one run.
    """
    lines: dict[int, Line] = {}
    pending: list[_Pending] = []
    deadline = time.monotonic() + timeout
    try:
        with server:
            while len(lines) < processes - 1:
                came = _next(server, pending, deadline)
                if came is None:
                    missing = sorted(set(range(1, processes)) - lines.keys())
                    raise Absent(
                        f"{_processes(missing)} of {processes} did not come within"
                        f" {timeout:g} s (connect_timeout)"
                    )
                line, message = came
                _check(message, lines, processes, described, line)
    except errors.NebulaError as error:
        is_refused = isinstance(error, errors.SettingsError)
        for line in lines.values():
            line.send({"refused" if is_refused else "absent": str(error)})
            line.close()
        raise
    finally:
        for each in pending:
            each.sock.close()
    for line in lines.values():
        line.send(answer)
    return lines, dict(answer)


@dataclasses.dataclass(eq=False)
class _Pending:
    """A connection that has not described itself yet."""

    sock: socket.socket
    deadline: float
    received: bytearray = dataclasses.field(default_factory=bytearray)

    def described(self) -> Message | None:
        """Reads what has come; returns the description, {} if it cannot be one."""
        try:
            data = self.sock.recv(json_lines.MOST_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            return {}
        self.received += data
        if data and b"\n" not in data and len(self.received) < json_lines.MOST_BYTES:
            return None
        try:
            message = json_lines.decode(self.received)
            json_lines.field(message, "rank", int)
        except json_lines.Malformed:
            return {}
        return message


def _next(
    server: socket.socket, pending: list[_Pending], deadline: float
) -> tuple[Line, Message] | None:
    """Waits for a process that describes itself; None if none comes in time.

    Others who come to this port, and are silent or slow, keep nobody waiting.

    Args:
      server: listens.
      pending: have come, and have not described themselves; changed in place.
      deadline: of time.monotonic.
    """
    server.setblocking(False)
    while (now := time.monotonic()) < deadline:
        waits = [server, *(each.sock for each in pending)]
        readable = _readable(waits, min(deadline - now, 1.0))
        for each in [each for each in pending if each.sock in readable]:
            if (message := each.described()) is None:
                continue
            pending.remove(each)
            if message:
                each.sock.setblocking(True)
                return Line(each.sock), message
            each.sock.close()  # something else came to this port
        if server in readable:
            with contextlib.suppress(OSError):
                sock, _ = server.accept()
                sock.setblocking(False)
                pending.append(_Pending(sock, now + HELLO_SECONDS))
        most = len(pending) - MOST_PENDING
        for number, each in enumerate(list(pending)):
            if number < most or now > each.deadline:
                pending.remove(each)
                each.sock.close()
    return None


def _readable(socks: Sequence[socket.socket], timeout: float) -> list[Any]:
    """Waits until some of these can be read, or have ended; returns them."""
    # `select.select` takes no descriptor beyond 1023.
    with selectors.PollSelector() as selector:
        for each in socks:
            selector.register(each, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(timeout)]


def _check(
    message: Message,
    lines: dict[int, Line],
    processes: int,
    described: Mapping[str, Any],
    line: Line,
) -> None:
    """Adds a process to `lines`, or raises errors.SettingsError."""
    rank, wrong = message["rank"], ""
    if message.get("processes") != processes:
        wrong = f"has num_processes={message.get('processes')}, process 0 {processes}"
    elif rank in lines or not 0 < rank < processes:
        wrong = "is there twice: each process has a process_id of its own"
    else:
        wrong = difference(message.get("described"), described)
    lines[-1 if wrong else rank] = line  # it gets the answer too
    if wrong:
        raise errors.SettingsError(f"process {rank} of the cluster {wrong}")


def difference(there: Any, here: Mapping[str, Any]) -> str:
    """Returns the first difference of another process's description, in words."""
    if not isinstance(there, dict):
        return "does not describe itself"
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            found = printable.line(f"{there.get(name)}", 200)
            return f"has {name}={found}, process 0 {here.get(name)}"
    return ""


def attend(
    address: tuple[str, int],
    rank: int,
    processes: int,
    described: Mapping[str, Any],
    timeout: float,
) -> tuple[Line, Message]:
    """Goes to the root, as another process, and waits for its answer.

    Args:
      address: of the coordinator.
      processes, described, timeout: as for `gather`.

    Returns:
      The line to the root, and its answer.

    Raises:
      Absent: if nobody answers, the root has ended, or others did not come.
      errors.SettingsError: if they are not the P processes of one run.
    """
    deadline = time.monotonic() + timeout
    where = endpoints.written(address)
    while True:
        try:
            left = max(RETRY_SECONDS, deadline - time.monotonic())
            sock = socket.create_connection(address, left)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise Absent(
                    f"nobody answers at coordinator={where} within {timeout:g} s"
                    f" (connect_timeout): {error.strerror or error}"
                ) from None
            time.sleep(RETRY_SECONDS)
    line = Line(sock)
    line.send({"rank": rank, "processes": processes, "described": dict(described)})
    left = max(HELLO_SECONDS, deadline - time.monotonic()) + HELLO_SECONDS
    if not line.arrives(left):
        line.close()
        raise Absent(
            f"the process at coordinator={where} did not answer within {timeout:g} s"
            " (connect_timeout): it may still wait for others"
        )
    message = line.read(HELLO_SECONDS)
    if message is None:
        raise Absent(f"the process at coordinator={where} has ended")
    if "refused" in message:
        raise errors.SettingsError(printable.line(str(message["refused"]), 500))
    if "absent" in message:
        raise Absent(printable.line(str(message["absent"]), 500))
    return line, message


def _processes(ranks: list[int]) -> str:
    numbers = ", ".join(map(str, ranks))
    return f"process {numbers}" if len(ranks) == 1 else f"processes {numbers}"
