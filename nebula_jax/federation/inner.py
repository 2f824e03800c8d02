"""The inner network of a lab: trainers and commands connect to their own switch here.

A connection begins with one line of JSON: the switch's token, which is in a file that
this lab alone can read, an account's token, and what is requested. The switch answers
with another line; after `dial`, the connection then is a stream to the other trainer.
"""

import asyncio
import contextlib
import fcntl
import json
import os
import pathlib
import secrets
import socket
from collections.abc import Mapping
from typing import Any, NamedTuple

from nebula_jax import disk, errors, files, strict_json
from nebula_jax.communication import endpoints
from nebula_jax.communication.wire import json_lines
from nebula_jax.security.membership import site_folder

TOKEN_BYTES = 32
REQUEST_SECONDS = 5.0
MOST_BYTES = 1 << 16  # of a request


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
    port: int
    token: str
    """Without it, the switch serves nobody."""
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


def write(path: pathlib.Path, address: Address, mode: int = 0o600) -> None:
    """Writes the address of the running switch to a file, by default for this user."""
    with files.writing(path) as partial:
        partial.touch(0o600)
        partial.write_text(json.dumps(address._asdict()))
        partial.chmod(mode)


def forget(folder: site_folder.Folder) -> None:
    """Removes the address of a switch that stops."""
    with contextlib.suppress(OSError):
        disk.remove(folder.running_switch)


def read(folder: site_folder.Folder) -> Address:
    """Reads the address of the running switch.

    Raises:
      NoSwitch: if none has written one.
    """
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
        sock = socket.create_connection((address.host, address.port), seconds)
    except ConnectionRefusedError:
        raise NoSwitch(
            f"{folder.path}: no switch answers at {address}; start it with `nebula"
            " switch`"
        ) from None
    endpoints.keep_alive(sock)
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


async def read_request(
    reader: asyncio.StreamReader, token: str
) -> Mapping[str, Any] | None:
    """Reads a request; returns None if it has not the switch's token.

    Raises:
      json_lines.Malformed: if it is none.
      TimeoutError: if it does not come.
    """
    async with asyncio.timeout(REQUEST_SECONDS):
        fields = await json_lines.read_from(reader)
    shown = json_lines.field(fields, "token", str)
    return fields if secrets.compare_digest(shown.encode(), token.encode()) else None


def answer(writer: asyncio.StreamWriter, **fields: Any) -> None:
    """Sends the answer to a request."""
    writer.write(json_lines.encode(fields))
