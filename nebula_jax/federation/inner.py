"""The inner network of a lab: trainers and commands connect to their own switch here.

A connection begins with one line of JSON: what is requested and, over TCP, the token of
this run of the switch. That is in a file of the lab's owner alone, whose requests these
are. Other users of the host come by a Unix socket, where the kernel says who they are.
The switch answers with another line; after `dial`, the connection then is a stream to
the other trainer.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import pathlib
import secrets
import socket
import stat
import struct
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from nebula_jax import disk, errors, files, strict_json
from nebula_jax.communication import endpoints
from nebula_jax.communication.wire import json_lines
from nebula_jax.security.membership import site_folder

TOKEN_BYTES = 32
REQUEST_SECONDS = 5.0
MOST_BYTES = 1 << 16  # of a request
SOCKET_MODE = 0o660
_UCRED = struct.Struct("iII")  # of struct ucred: pid, uid, gid


class NoSwitch(errors.NebulaError):
    """A switch that does not run, or does not answer."""


class Refused(errors.NebulaError):
    """A request that the switch refused, with its reason."""


class Lost(Refused):
    """A trainer that cannot come back: its lab, or this one, was revoked."""


class Absent(errors.NebulaError):
    """A trainer that is nowhere at present, and may come."""


class Address(NamedTuple):
    """The inner address of the running switch."""

    host: str
    """The path of a Unix socket at the port 0."""
    port: int
    token: str
    """Without it, the switch serves nobody over TCP."""
    pid: int

    def __repr__(self) -> str:
        """Leaves the token out."""
        return endpoints.written((self.host, self.port))


def lock(folder: site_folder.Folder) -> int:
    """Makes this the only switch of its lab; returns a descriptor, to be closed.

    Raises:
      NoSwitch: if another one runs.
    """
    held = os.open(folder.path / ".switch.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        raise NoSwitch(f"{folder.path}: a switch of this lab runs already") from None
    return held


def write(folder: site_folder.Folder, address: Address) -> None:
    """Writes the address of the running switch, for this user alone."""
    with files.writing(folder.running_switch) as partial:
        partial.touch(0o600)
        partial.write_text(json.dumps(address._asdict()))


@contextlib.contextmanager
def _short(path: pathlib.Path) -> Iterator[str]:
    """Yields a path of the same file that is short enough for a socket's address."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def listen(path: pathlib.Path) -> socket.socket:
    """Returns a Unix socket for the users of the path's group; one that is left goes.

    Raises:
      NoSwitch: if it cannot be made, or something else is there.
    """
    sock = socket.socket(socket.AF_UNIX)
    try:
        if os.path.lexists(path) and stat.S_ISSOCK(path.lstat().st_mode):
            disk.remove(path)
        with _short(path) as short:
            sock.bind(short)
            os.chmod(short, SOCKET_MODE)
    except OSError as error:
        sock.close()
        raise NoSwitch(f"{path}: no socket can be made: {error.strerror}") from None
    return sock


def user_of(sock: socket.socket) -> int:
    """Returns the uid at the other end of a Unix socket, as the kernel has it."""
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    _, uid, _ = _UCRED.unpack(found)
    return int(uid)


def forget(folder: site_folder.Folder) -> None:
    """Removes the address of a switch that stops."""
    with contextlib.suppress(OSError):
        disk.remove(folder.running_switch)


def read(folder: site_folder.Folder) -> Address:
    """Reads the address of the running switch.

    In the folder of another user it is that of the socket to which a link leads.

    Raises:
      NoSwitch: if none has written one.
    """
    if folder.socket.is_symlink():
        return Address(str(folder.socket.resolve()), 0, "", 0)
    try:
        fields = strict_json.loads(folder.running_switch.read_bytes())
        found = Address(**fields)
    except FileNotFoundError:
        raise NoSwitch(
            f"{folder.path}: the switch of this lab does not run; start it with `nebula"
            " switch`"
        ) from None
    except (OSError, ValueError, TypeError):
        raise NoSwitch(f"{folder.running_switch}: cannot be read") from None
    return found


def new_token() -> str:
    """Makes a token for one run of a switch."""
    return secrets.token_urlsafe(TOKEN_BYTES)


def request(
    folder: site_folder.Folder, seconds: float, op: str, **fields: Any
) -> tuple[socket.socket, Mapping[str, Any]]:
    """Sends a request to the own switch, and waits for its answer.

    Args:
      folder: of this lab.
      seconds: for each of connection and answer.
      op: of the request.
      fields: of the request.

    Returns:
      The connection, which ends if the switch's host vanishes, and the answer.

    Raises:
      NoSwitch: if it does not run.
      Refused: with its reason; Lost, if the trainer that is wanted cannot come back.
      Absent: if the trainer that is wanted is nowhere.
      OSError: if it does not answer in time.
    """
    address = read(folder)
    try:
        sock = _connected(address, seconds)
    except (ConnectionRefusedError, FileNotFoundError):
        raise NoSwitch(
            f"{folder.path}: no switch answers at {address}; start it with `nebula"
            " switch`"
        ) from None
    try:
        line = {"token": address.token, "op": op, **fields}
        sock.sendall(json_lines.encode(line))
        answer = json_lines.read(sock)
        if "absent" in answer:
            raise Absent(json_lines.field(answer, "absent", str))
        if "lost" in answer:
            raise Lost(json_lines.field(answer, "lost", str))
        if "error" in answer:
            raise Refused(json_lines.field(answer, "error", str))
        return sock, answer
    except EOFError:
        sock.close()
        raise NoSwitch("the switch closed the connection without an answer") from None
    except BaseException:
        sock.close()
        raise


def _connected(address: Address, seconds: float) -> socket.socket:
    if address.port:
        sock = socket.create_connection((address.host, address.port), seconds)
        endpoints.keep_alive(sock)
        return sock
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(seconds)
        with _short(pathlib.Path(address.host)) as short:
            sock.connect(short)
    except BaseException:
        sock.close()
        raise
    return sock


async def read_request(reader: asyncio.StreamReader) -> Mapping[str, Any]:
    """Reads a request.

    Raises:
      json_lines.Malformed: if it is none.
      TimeoutError: if it does not come.
    """
    async with asyncio.timeout(REQUEST_SECONDS):
        return await json_lines.read_from(reader)


def has_token(fields: Mapping[str, Any], token: str) -> bool:
    """Returns True if a request has the switch's token."""
    shown = json_lines.field(fields, "token", str)
    return secrets.compare_digest(shown.encode(), token.encode())


def answer(writer: asyncio.StreamWriter, **fields: Any) -> None:
    """Sends the answer to a request."""
    writer.write(json_lines.encode(fields))
