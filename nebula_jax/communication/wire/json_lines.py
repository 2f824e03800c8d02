"""A JSON object on a line: how commands, switches and processes of a cluster speak.

Every reader has a bound, so that no peer fills the memory with a line without an end.
"""

import asyncio
import json
import socket
from collections.abc import Mapping
from typing import Any

from nebula_jax import errors, strict_json

MOST_BYTES = 1 << 20  # of a line


class Malformed(errors.NebulaError):
    """An error in what another process sent: no message, or one with a wrong field."""


class Nothing(Malformed):
    """A connection that ended before a byte of a message had come."""


def encode(fields: Mapping[str, Any]) -> bytes:
    """Returns the line of an object."""
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def decode(data: bytes | bytearray) -> dict[str, Any]:
    """Reads an object; raises Malformed if it is none."""
    try:
        fields = strict_json.loads(data)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise Malformed("a message that is no JSON object")
    return fields


def field(fields: Mapping[str, Any], name: str, kind: type) -> Any:
    """Returns a field; raises Malformed if it is missing, or of another type."""
    value = fields.get(name)
    if type(value) is not kind:
        raise Malformed(f"a message whose {name} is no {kind.__name__}")
    return value


def read(sock: socket.socket) -> dict[str, Any]:
    """Reads a line, and no byte beyond it: a stream may follow.

    Raises EOFError if the connection ended without a byte; Malformed if it is no
    object, or longer than MOST_BYTES; OSError of the socket, TimeoutError if it has a
    timeout.
    """
    with sock.makefile("rb", buffering=0) as stream:
        line = stream.readline(MOST_BYTES)
    if not line:
        raise EOFError("the connection was closed without an answer")
    return decode(line)


async def read_from(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Reads a line no longer than the reader's limit.

    Raises Nothing if the connection ended without a byte; Malformed if it is no object,
    or longer.
    """
    try:
        line = await reader.readline()
    except ValueError:  # of `readline`: beyond the limit
        raise Malformed("a line without an end") from None
    if not line:
        raise Nothing("the connection was closed without a message")
    return decode(line)
