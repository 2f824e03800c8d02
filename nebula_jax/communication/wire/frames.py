"""Messages and their bytes. Nothing on the wire is code, and nothing needs a pickle.

A frame is a fixed head, a small typed header, and a payload:

    offset  bytes  field
         0      4  magic `NEBL`
         4      1  version of this format
         5      1  kind, an index into KINDS
         6      2  length of the typed header
         8      8  sequence number of the frame in its direction; 0 if not numbered
        16      8  frames that the sender has taken from the other direction
        24      8  length of the payload
        32      .  typed header, then payload

Integers are big-endian, buffers are as they lie in memory (little-endian).

What is said is numbered, from the first Hello to End, over as many connections as it
takes. Open, Ping and Abort belong to one connection and have no number.
"""

import dataclasses
import json
import re
import struct
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from nebula_jax import errors

VERSION = 2
MAGIC = b"NEBL"
HEAD = struct.Struct("!4sBBHQQQ")

MAX_HELLO_BYTES = 1 << 16  # settings of a run are a few KiB
MAX_REASON_BYTES = 1 << 12  # an error in words
_NAME = re.compile(r"[!-~]{1,100}")  # of a cluster, as it may stand in a message
JOINED_BYTES = 1 << 12  # a payload up to this size leaves in one piece with its head


class FrameError(errors.NebulaError):
    """Bytes that are no frame of ours."""


@dataclasses.dataclass(frozen=True)
class Open:
    """The first frame of each side on every connection: which session goes on.

    The head's `taken` says from which frame on the other side shall send (again).
    """

    LAYOUT: ClassVar = struct.Struct("!16sI")
    session: bytes
    """16 random bytes, drawn by the connector."""
    epoch: int
    """Counts the session's connections from 1; an older one is never taken up."""


@dataclasses.dataclass(frozen=True)
class Hello:
    """The first message of each side."""

    LAYOUT: ClassVar = struct.Struct("")
    cluster: str
    """Who speaks, such as `generator:0`."""
    version: str
    """Of nebula_jax."""
    settings: dict[str, Any]
    """What both sides must agree on; JSON values."""
    checkpoints: tuple[int, ...] = ()
    """Steps that this cluster could go on from, 0 for a fresh start not included."""
    details: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What the peer should know but need not have alike; JSON values."""


@dataclasses.dataclass(frozen=True)
class Welcome:
    """All clusters are here; the run goes on after step `step`."""

    LAYOUT: ClassVar = struct.Struct("!Q")
    step: int


class Tensor(NamedTuple):
    """One encoded pytree: its leaves' bytes, one flat byte buffer each.

    On a channel with zstd a table of their lengths on the wire, 8 bytes each, comes
    first; the length of the plan means: as it is.
    """

    channel: int
    step: int
    micro_batch: int
    buffers: Sequence[Any]
    option: int = 0
    """Which of the shapes that the channel's codec offers."""

    LAYOUT = struct.Struct("!HQIB")


@dataclasses.dataclass(frozen=True)
class StepDone:
    """The step token of section 3.3."""

    LAYOUT: ClassVar = struct.Struct("!Q")
    step: int


@dataclasses.dataclass(frozen=True)
class Stop:
    """To the listener: please stop. From the listener: the run ends after `step`."""

    LAYOUT: ClassVar = struct.Struct("!Q")
    step: int


@dataclasses.dataclass(frozen=True)
class Ping:
    """I am still here, and have taken so many frames."""

    LAYOUT: ClassVar = struct.Struct("")


@dataclasses.dataclass(frozen=True)
class End:
    """Nothing more comes from me. (A closed connection alone is an error.)"""

    LAYOUT: ClassVar = struct.Struct("")


@dataclasses.dataclass(frozen=True)
class Abort:
    """I give up, and this is why."""

    LAYOUT: ClassVar = struct.Struct("")
    reason: str


Message = Hello | Welcome | Tensor | StepDone | Stop | Ping | End | Abort | Open
KINDS = (Hello, Welcome, Tensor, StepDone, Stop, Ping, End, Abort, Open)
UNNUMBERED = (Open, Ping, Abort)
_NUMBER = {kind: number for number, kind in enumerate(KINDS)}

# Head and typed header of a tensor at once: most frames are one.
TENSOR = struct.Struct(HEAD.format + Tensor.LAYOUT.format.removeprefix("!"))
TENSOR_START = (MAGIC, VERSION, _NUMBER[Tensor], Tensor.LAYOUT.size)


class Head(NamedTuple):
    """The fixed part of a frame."""

    kind: type
    sequence: int
    taken: int
    payload_bytes: int


def tensor_bytes(message: Tensor) -> int:
    """Bytes of its buffers together."""
    buffers = message.buffers
    return len(buffers[0]) if len(buffers) == 1 else sum(map(len, buffers))


def encode(message: Message, sequence: int, taken: int) -> list[Any]:
    """The frame of a message as a list of buffers; a large tensor is not copied.

    Args:
      message: what to say.
      sequence: its number; 0 for one of UNNUMBERED.
      taken: numbered frames received so far.
    """
    kind = type(message)
    if kind is Tensor:
        channel, step, micro_batch, payload, option = message
        size = tensor_bytes(message)
        start = TENSOR.pack(
            *TENSOR_START, sequence, taken, size, channel, step, micro_batch, option
        )
    else:
        fields, payload = _parts(message)
        size, layout = sum(map(len, payload)), kind.LAYOUT
        start = HEAD.pack(
            MAGIC, VERSION, _NUMBER[kind], layout.size, sequence, taken, size
        ) + layout.pack(*fields)
    return [b"".join((start, *payload))] if size <= JOINED_BYTES else [start, *payload]


def _parts(message: Message) -> tuple[Sequence[Any], Sequence[bytes]]:
    """The fields of a message's typed header, and its payload."""
    if isinstance(message, Hello):
        return (), (_hello_bytes(message),)
    if isinstance(message, Abort):
        return (), (message.reason.encode("utf-8", "replace")[:MAX_REASON_BYTES],)
    if isinstance(message, Welcome | StepDone | Stop):
        return (message.step,), ()
    if isinstance(message, Open):
        return (message.session, message.epoch), ()
    return (), ()


def decode_head(data: bytes) -> Head:
    """Reads the first HEAD.size bytes of a frame.

    Raises:
      FrameError: where they are no head of this version, or contradict themselves.
    """
    magic, version, kind, header_bytes, sequence, taken, payload_bytes = HEAD.unpack(
        data
    )
    if magic != MAGIC:
        raise FrameError(f"sent {magic!r}, which begins no frame of ours")
    if version != VERSION:
        raise FrameError(f"speaks frame version {version}; this is version {VERSION}")
    if kind >= len(KINDS):
        raise FrameError(f"sent a frame of unknown kind {kind}")
    kind = KINDS[kind]
    if header_bytes != kind.LAYOUT.size:
        raise FrameError(
            f"sent {kind.__name__} with a header of {header_bytes} bytes;"
            f" expected {kind.LAYOUT.size}"
        )
    return Head(kind, sequence, taken, payload_bytes)


def decode(head: Head, header: bytes, buffers: Sequence[Any]) -> Message:
    """Builds the message from its parts, all of the announced lengths.

    Raises:
      FrameError: where the contents are not what the kind says.
    """
    fields = head.kind.LAYOUT.unpack(header)
    if head.kind is Tensor:
        channel, step, micro_batch, option = fields
        return Tensor(channel, step, micro_batch, buffers, option)
    if head.kind is Hello:
        return _hello(bytes(buffers[0]))
    if head.kind is Abort:
        reason = bytes(buffers[0]).decode("utf-8", "replace")
        return Abort("".join(c if c.isprintable() else "\ufffd" for c in reason))
    return head.kind(*fields)


def _hello_bytes(message: Hello) -> bytes:
    fields = dataclasses.asdict(message)
    data = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    if len(data) > MAX_HELLO_BYTES:
        raise FrameError(f"our Hello has {len(data)} bytes; at most {MAX_HELLO_BYTES}")
    return data


def _hello(data: bytes) -> Hello:
    try:
        fields = json.loads(data)
        hello = Hello(
            fields["cluster"],
            fields["version"],
            fields["settings"],
            tuple(fields["checkpoints"]),
            fields["details"],
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        raise FrameError("sent a Hello that cannot be read") from None
    typed = (
        isinstance(hello.cluster, str)
        and _NAME.fullmatch(hello.cluster)
        and isinstance(hello.version, str)
        and isinstance(hello.settings, dict)
        and isinstance(hello.details, dict)
        and all(type(step) is int and step > 0 for step in hello.checkpoints)
    )
    if not typed or len(fields) != 5:
        raise FrameError("sent a Hello with fields of the wrong type")
    return hello
