"""The inner network of a lab: trainers and commands connect to their own switch here.

Over TCP both sides first prove (`security.shared_secret`) that they have the token of
this run of the switch, which never crosses. It is in a file of the lab's owner alone,
whose requests these are. Other users of the host come by a Unix socket, where the
kernel says who they are. A request is one line of JSON, and so is its answer; after
`dial`, the connection is a stream to the other trainer.
"""

import asyncio
import contextlib
import json
import os
import pathlib
import socket
import stat
import struct
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from nebula_jax import disk, errors, strict_json
from nebula_jax.communication import endpoints
from nebula_jax.communication.wire import json_lines
from nebula_jax.security import private_files, shared_secret
from nebula_jax.security.membership import site_folder

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

    host: str  # the path of a Unix socket if the port is 0
    port: int
    token: str  # a secret: without it, the switch serves nobody over TCP

    def __repr__(self) -> str:
        """Leaves the token out."""
        return endpoints.written((self.host, self.port))


def write(folder: site_folder.Folder, address: Address) -> None:
    """Writes the address of the running switch, for this user alone."""
    private_files.write(folder.running_switch, json.dumps(address._asdict()))


@contextlib.contextmanager
def _short(path: pathlib.Path) -> Iterator[str]:
    """Yields a path of the same file that is short enough for a socket's address."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def listen(path: pathlib.Path) -> socket.socket:
    """Returns a Unix socket for a path's group; raises NoSwitch if none can be made."""
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
    """Reads the running switch's address; raises NoSwitch if none has written one."""
    if folder.socket.is_symlink():  # in the folder of another user
        return Address(str(folder.socket.resolve()), 0, "")
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


def own_host(folder: site_folder.Folder) -> str:
    """Returns this host's address towards its switch; raises NoSwitch without one."""
    address = read(folder)
    if not address.port:
        return "127.0.0.1"
    try:
        found = socket.getaddrinfo(*address[:2], type=socket.SOCK_DGRAM)
        with socket.socket(*found[0][:2]) as sock:
            sock.connect(found[0][4])  # sends nothing
            return str(sock.getsockname()[0])
    except OSError as error:
        raise NoSwitch(f"{address}: no way leads there: {error}") from None


def request(
    folder: site_folder.Folder, seconds: float, op: str, **fields: Any
) -> tuple[socket.socket, Mapping[str, Any]]:
    """Sends a request to the own switch; returns the connection and its answer.

    Waits `seconds` for each of connection and answer; the connection ends if the
    switch's host vanishes. Raises NoSwitch if the switch does not run, or something
    else has its address; Refused, with its reason; Lost, if the trainer that is wanted
    cannot come back; Absent, if that is nowhere; OSError without an answer in time.
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
        if address.port:
            _prove(sock, address, op)
        sock.sendall(json_lines.encode({"op": op, **fields}))
        answer = json_lines.read(sock)
        if "absent" in answer:
            raise Absent(json_lines.field(answer, "absent", str))
        if "lost" in answer:
            raise Lost(json_lines.field(answer, "lost", str))
        if "error" in answer:
            raise Refused(json_lines.field(answer, "error", str))
        return sock, answer
    except shared_secret.Unproven as error:
        sock.close()
        raise NoSwitch(f"no switch of {folder.path} is at {address}: {error}") from None
    except EOFError:
        sock.close()
        raise NoSwitch("the switch closed the connection without an answer") from None
    except BaseException:
        sock.close()
        raise


def ask(
    folder: site_folder.Folder, seconds: float, op: str, **fields: Any
) -> Mapping[str, Any]:
    """Returns the own switch's answer to a request that ends with it; see `request`."""
    sock, answer = request(folder, seconds, op, **fields)
    sock.close()
    return answer


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


def _prove(sock: socket.socket, address: Address, op: str) -> None:
    """Exchanges proofs with the switch; raises shared_secret.Unproven if it is none."""
    secret, asked = address.token.encode(), json_lines.read(sock)
    claim, message = shared_secret.claim(secret, repr(address), os.getpid(), op, asked)
    sock.sendall(json_lines.encode(message))
    shared_secret.check_listener(secret, claim, json_lines.read(sock))


async def read_request(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, own: Address | None
) -> Mapping[str, Any]:
    """Reads a request, over TCP once both sides have proven that they have the token.

    `own` is the address of this switch; None for who has come by the Unix socket.
    Raises shared_secret.Unproven if the caller does not have the token, of which it is
    told; json_lines.Malformed if it sends no request; TimeoutError if it sends none in
    time.
    """
    async with asyncio.timeout(REQUEST_SECONDS):
        proven = await _proven(reader, writer, own) if own else None
        fields = await json_lines.read_from(reader)
    if proven not in (None, fields.get("op")):
        raise json_lines.Malformed("a request for something else than was proven")
    return fields


async def _proven(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, own: Address
) -> str:
    """Exchanges proofs with a caller; returns for which request."""
    secret, asked = own.token.encode(), shared_secret.challenge()
    answer(writer, **asked)
    message = await json_lines.read_from(reader)
    try:
        claim, reply = shared_secret.check_caller(secret, repr(own), asked, message)
    except shared_secret.Unproven:
        answer(writer, **shared_secret.REFUSED)
        raise
    answer(writer, **reply)
    return claim.purpose


def answer(writer: asyncio.StreamWriter, **fields: Any) -> None:
    """Sends the answer to a request."""
    writer.write(json_lines.encode(fields))
