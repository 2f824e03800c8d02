"""The rendezvous of the processes of one cluster, before they are one program.

The root waits behind the coordinator's port, its door. Every other process comes, and
both prove that they have the run's secret (`shared_secret`). Then it describes itself;
once all are there and agree, or one is found not to, all get one answer. The
connections stay open: `cluster` watches over them. The door stays open too: behind it
is JAX's coordination service, which listens nowhere else.

A message is a JSON object on a line. P processes; rank 0 is the root.
"""

import contextlib
import os
import pathlib
import queue
import secrets
import selectors
import socket
import tempfile
import threading
import time
from collections.abc import Mapping
from typing import Any

from nebula_jax import errors, printable
from nebula_jax.communication import endpoints, pending_connections
from nebula_jax.communication.wire import greeting, json_lines
from nebula_jax.runtime.ranks import proxy
from nebula_jax.security import private_files, shared_secret

RETRY_SECONDS = 0.2
HELLO_SECONDS = 20.0  # for who has connected to prove and describe itself
SECRET_VARIABLE = "NEBULA_CLUSTER_KEY"
SECRET_FILE = "cluster.key"
LEAST_SECRET = 32  # characters

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
        with selectors.PollSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            return bool(selector.select(timeout))

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


class Door:
    """The port of a cluster, at its root: says nothing to who has not proven itself.

    Anybody may come, be silent or send garbage (see `pending_connections.Acceptor`).
    """

    def __init__(self, server: socket.socket, secret: bytes, address: str) -> None:
        """Opens it, at a socket that it closes; all were given the `address`."""
        self.came: queue.Queue[tuple[int, Line, Message]] = queue.Queue()
        """Ranks, lines and descriptions of those who have proven themselves."""
        self.is_complete = False  # True once all are there: nobody else may come
        self.service = ""  # the path of the socket of JAX's service
        self.unproven = 0  # connections that had another secret, or none
        self._secret, self._address = secret, address
        self.acceptor = pending_connections.Acceptor(
            server, self._steps, HELLO_SECONDS, first=selectors.EVENT_WRITE
        )

    def _steps(self, pending: pending_connections.Pending) -> greeting.Steps[None]:
        """Lets in who proves itself."""
        sock, asked = pending.sock, shared_secret.challenge()
        yield from greeting.send(sock, json_lines.encode(asked))
        message = yield from _line(sock, shared_secret.MOST_BYTES)
        try:
            claim, reply = shared_secret.check_caller(
                self._secret, self._address, asked, message
            )
        except shared_secret.Unproven:
            self.unproven += 1
            yield from greeting.send(sock, json_lines.encode(shared_secret.REFUSED))
            return
        if claim.purpose == shared_secret.SERVICE:
            with contextlib.ExitStack() as unless_carried:
                service = socket.socket(socket.AF_UNIX)
                unless_carried.enter_context(service)
                service.connect(self.service)
                yield from greeting.send(sock, json_lines.encode(reply))
                unless_carried.pop_all()
            pending.is_taken = True
            proxy.carry(sock, service)
            return
        is_late = self.is_complete
        yield from greeting.send(sock, json_lines.encode(reply | {"is_late": is_late}))
        if not is_late:
            described = yield from _line(sock, json_lines.MOST_BYTES)
            pending.is_taken = True
            sock.setblocking(True)
            self.came.put((claim.number, Line(sock), described))


def _line(sock: socket.socket, most: int) -> greeting.Steps[Message]:
    """Reads a message, after which the peer waits for this side."""
    data = bytearray()
    while not data.endswith(b"\n"):
        receive = sock.recv, most - len(data)
        part = yield from greeting.when_ready(selectors.EVENT_READ, *receive)
        if not part:
            raise ConnectionError("it ended, or is too long")
        data += part
    return json_lines.decode(data)


def gather(
    door: Door, processes: int, described: Mapping[str, Any], timeout: float
) -> dict[int, Line]:
    """Waits, as the root, for all others; returns rank -> line to it.

    The door stays open, unless this fails. `described` must be equal in all processes:
    JSON values by name. Raises Absent, with their names, if some did not come in
    `timeout` seconds; errors.SettingsError if they are not the P processes of one run.
    """
    lines: dict[int, Line] = {}
    deadline = time.monotonic() + timeout
    try:
        while len(lines) < processes - 1:
            try:
                left = max(0.0, deadline - time.monotonic())
                rank, line, message = door.came.get(timeout=left)
            except queue.Empty:
                raise Absent(_missing(door, processes, lines, timeout)) from None
            _check(rank, message, lines, processes, described, line)
    except errors.NebulaError as error:
        is_refused = isinstance(error, errors.SettingsError)
        for line in lines.values():
            line.send({"refused" if is_refused else "absent": str(error)})
            line.close()
        door.acceptor.close()
        raise
    door.is_complete = True
    for line in lines.values():
        line.send({})
    return lines


def _missing(
    door: Door, processes: int, lines: Mapping[int, Line], timeout: float
) -> str:
    missing = sorted(set(range(1, processes)) - lines.keys())
    found = (
        f"{_processes(missing)} of {processes} did not come within {timeout:g} s"
        " (connect_timeout)"
    )
    if door.unproven:
        found += f"; {door.unproven} connections came without this run's secret"
    return found


def _check(
    rank: int,
    message: Message,
    lines: dict[int, Line],
    processes: int,
    described: Mapping[str, Any],
    line: Line,
) -> None:
    """Adds a process to `lines`, or raises errors.SettingsError."""
    wrong = ""
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
    secret: bytes,
    rank: int,
    processes: int,
    described: Mapping[str, Any],
    timeout: float,
) -> Line:
    """Goes to the root, as another process, and waits for its answer; see `gather`.

    Returns the line to it. Raises Absent if nobody answers, the root has ended, or
    others did not come; errors.SettingsError if not all P are of one run.
    """
    deadline = time.monotonic() + timeout
    where = endpoints.written(address)
    line = Line(_connected(address, secret, rank, timeout))
    line.send({"processes": processes, "described": dict(described)})
    left = max(RETRY_SECONDS, deadline - time.monotonic()) + HELLO_SECONDS
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
    return line


def _connected(
    address: tuple[str, int], secret: bytes, rank: int, timeout: float
) -> socket.socket:
    """Knocks until the root opens; raises as `attend` does."""
    deadline = time.monotonic() + timeout
    where = endpoints.written(address)
    while True:
        try:
            return knock(address, secret, rank, shared_secret.RENDEZVOUS, deadline)
        except shared_secret.OtherSecret as error:
            raise errors.SettingsError(
                f"coordinator={where}: {error}: give all processes of the cluster the"
                f" same coordinator, and the same workdir (on one disk) or"
                f" {SECRET_VARIABLE} in the environment"
            ) from None
        except (OSError, errors.NebulaError) as error:
            if time.monotonic() > deadline:
                reason = getattr(error, "strerror", None) or error
                raise Absent(
                    f"nobody answers at coordinator={where} within {timeout:g} s"
                    f" (connect_timeout): {reason}"
                ) from None
        time.sleep(RETRY_SECONDS)


def knock(
    address: tuple[str, int], secret: bytes, rank: int, purpose: str, deadline: float
) -> socket.socket:
    """Connects to the root's door once, with proofs of both sides.

    Gives up at the monotonic `deadline`, or a moment later if it is past. Raises
    shared_secret.Unproven if one of both has another secret; OSError,
    json_lines.Malformed if nobody is there, or nobody of this cluster, or the root
    takes no more processes.
    """
    left = max(RETRY_SECONDS, deadline - time.monotonic())
    sock = socket.create_connection(address, left)

    def prove() -> greeting.Steps[None]:
        asked = yield from _line(sock, shared_secret.MOST_BYTES)
        where = endpoints.written(address)
        claim, message = shared_secret.claim(secret, where, rank, purpose, asked)
        yield from greeting.send(sock, json_lines.encode(message))
        reply = yield from _line(sock, shared_secret.MOST_BYTES)
        shared_secret.check_listener(secret, claim, reply)
        if reply.get("is_late"):
            raise ConnectionRefusedError("all of its processes are there already")

    try:
        greeting.set_up(sock)
        greeting.run(prove(), sock, time.monotonic() + left, left)
        sock.setblocking(True)
    except BaseException:
        sock.close()
        raise
    return sock


def _processes(ranks: list[int]) -> str:
    numbers = ", ".join(map(str, ranks))
    return f"process {numbers}" if len(ranks) == 1 else f"processes {numbers}"


def secret_of_run(folder: pathlib.Path) -> bytes:
    """Returns the secret of a run, which is made if there is none.

    It is in a variable of the environment, or in a file of the run's folder that the
    first process makes, whichever that is: then all hosts share the disk of it. Raises
    errors.SettingsError if it is too short, or can be neither read nor made.
    """
    if given := os.environ.get(SECRET_VARIABLE):
        if len(given) < LEAST_SECRET:
            raise errors.SettingsError(
                f"{SECRET_VARIABLE} in the environment has {len(given)} characters;"
                f" {LEAST_SECRET} random ones are needed, as of: openssl rand -hex 32"
            )
        return os.fsencode(given)
    path = folder / SECRET_FILE
    try:
        if not path.exists():
            _make_secret(path)
        found = private_files.read(path).strip()
    except (OSError, private_files.PrivateFileError) as error:
        raise errors.SettingsError(
            f"workdir: this run's secret: {error}; or give all processes of the cluster"
            f" the same {SECRET_VARIABLE} in the environment"
        ) from None
    if len(found) < LEAST_SECRET:
        raise errors.SettingsError(f"workdir: {path}: holds no secret; delete it")
    return found.encode()


def _make_secret(path: pathlib.Path) -> None:
    """Makes the file, whole; of several processes that do so, one has made it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{SECRET_FILE}."
    with tempfile.TemporaryDirectory(prefix=prefix, dir=path.parent) as folder:
        own = pathlib.Path(folder) / SECRET_FILE
        private_files.write(own, secrets.token_hex(32) + "\n")
        with contextlib.suppress(FileExistsError):
            os.link(own, path)
