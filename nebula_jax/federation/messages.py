"""The messages of a line between two switches, and their bytes.

    offset  bytes  field
         0      1  kind: CONTROL, DATA, CREDIT, CLOSE
         1      3  length of what follows the head
         4      4  stream; 0 for the line itself

A control message is a JSON object, data are bytes of a stream, a credit lets the other
side send so many bytes more on a stream, and a close ends a stream with a reason.
"""

import json
import struct
from collections.abc import Mapping
from typing import Any

from nebula_jax import errors

CONTROL, DATA, CREDIT, CLOSE = 1, 2, 3, 4
HEAD = struct.Struct("!II")
CHUNK_BYTES = 60 << 10
"""The most data in a message: others get their turn soon, even on a slow line."""
MOST_BYTES = {CONTROL: 1 << 20, DATA: CHUNK_BYTES, CREDIT: 4, CLOSE: 1 << 12}
_CREDIT = struct.Struct("!I")


class Malformed(errors.NebulaError):
    """An error in bytes of the other switch that are no message."""


def encode(kind: int, stream: int, data: bytes = b"") -> bytes:
    """Returns the bytes of a message."""
    return HEAD.pack(kind << 24 | len(data), stream) + data


def control(**fields: Any) -> bytes:
    """Returns a control message."""
    return encode(CONTROL, 0, json.dumps(fields, separators=(",", ":")).encode())


def credit(stream: int, count: int) -> bytes:
    """Returns a message that lets the other side send `count` bytes more."""
    return encode(CREDIT, stream, _CREDIT.pack(count))


def read_head(data: bytes) -> tuple[int, int, int]:
    """Reads a head: kind, stream, length.

    Raises:
      Malformed: if there is no such message, or it is too long.
    """
    word, stream = HEAD.unpack(data)
    kind, length = word >> 24, word & 0xFFFFFF
    if length > MOST_BYTES.get(kind, -1):
        raise Malformed(f"a message of kind {kind} and {length} bytes")
    return kind, stream, length


def read_credit(data: bytes) -> int:
    """Reads a credit.

    Raises:
      Malformed: if it is none.
    """
    if len(data) != _CREDIT.size:
        raise Malformed("a credit that cannot be read")
    return int(_CREDIT.unpack(data)[0])


def read_object(data: bytes) -> Mapping[str, Any]:
    """Reads a control message.

    Raises:
      Malformed: if it is no JSON object.
    """
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise Malformed("a control message that is no JSON object")
    return fields


def field(fields: Mapping[str, Any], name: str, kind: type) -> Any:
    """Returns a field of a control message.

    Raises:
      Malformed: if it is missing, or of another type.
    """
    value = fields.get(name)
    if type(value) is not kind:
        raise Malformed(f"a control message whose {name} is no {kind.__name__}")
    return value
