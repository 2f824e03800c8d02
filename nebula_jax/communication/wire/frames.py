"""Messages and their bytes. Nothing on the wire is code, and nothing needs a pickle.

A frame is a fixed head, a small typed header, and a payload:

    offset  bytes  field
         0      4  magic `NEBL`
         4      1  version of this format
         5      1  kind, an index into KINDS
         6      2  length of the typed header
         8      8  sequence number of the frame in its direction; 0 if not numbered
        16      8  acknowledged: numbered frames received from the other direction
        24      8  length of the payload
        32      8  checksum of the payload
        40      8  checksum of the 40 bytes before it and the typed header
        48      .  typed header, then payload

Integers are big-endian, buffers are as they lie in memory (little-endian). Checksums
are XXH3 of 64 bits: TCP's own 16 bits let damage of a bad router or memory through.
They are no protection against people, which TLS is. Between trainers of different labs
frames are sealed: magic `NEBS`, the payload encrypted unless it is in clear (IN_CLEAR),
and two MACs of 16 bytes where the checksums are (see `security.seal`). The switches
between them read heads and typed headers, and can make no MAC.

What a checksum does not confirm was damaged on its way: that ends the connection, and
the frame is sent again on the next one. What it confirms and the protocol or the schema
forbids is the peer's fault, and ends the session.

The messages of a session are numbered, from Hello to End, over as many connections as
it takes. Open, Ping and Abort belong to one connection and have no number.
"""

import dataclasses
import hmac
import json
import reprlib
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from nebula_jax import errors, printable, strict_json
from nebula_jax.communication.wire.activity import Activity
from nebula_jax.communication.wire.integrity import CHECKSUMS, Integrity
from nebula_jax.security import names

VERSION = 3
CHECKSUM = struct.Struct("!Q")
_FIELDS = struct.Struct("!4sBBHQQQ")  # of a head: all but its tags

MAX_HELLO_BYTES = 1 << 16  # settings of a run are a few KiB
MAX_REASON_BYTES = 1 << 12  # of an error
REASON_SHOWN = 1000  # characters of a peer's
MAX_WELCOME_BYTES = 1 << 20  # 10,000 arrays in one channel, or 5,000 channels
MAX_OPTIONS = 255  # shapes of a channel: a frame has one byte for their number
STEP_END = 255  # the option of a frame that ends a step, see `Tensor.is_end`
IDENTITY_BYTES = 8  # all that such a frame carries
MAX_STEP = 1 << 32  # no run takes as many, and what counts them has 32 bits or more
TLS_RECORDS = (b"\x16\x03", b"\x15\x03")  # a handshake's begin, and an alert's
JOINED_BYTES = 1 << 12  # a payload up to this size leaves in one piece with its head


class FrameError(errors.NebulaError):
    """A frame that cannot be read, or that the schema does not allow."""


class Damaged(errors.NebulaError):
    """A connection whose bytes are not those that were sent: it is of no use."""


@dataclasses.dataclass(frozen=True)
class Open:
    """The first frame of each side on every connection: it names the session.

    The other side sends again from the frame on that the head acknowledges.
    """

    session_id: bytes  # 16 random bytes, drawn by the connector
    epoch: int  # the connection's number in its session, from 1; no older one may come


@dataclasses.dataclass(frozen=True)
class Hello:
    """The first message of each side."""

    cluster: str  # the sender, such as `generator:0`
    version: str  # the sender's version of nebula_jax
    settings: dict[str, Any]  # values that must be equal on both sides; JSON
    checkpoints: tuple[int, ...] = ()  # steps that it could go on from, without 0
    details: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Values that the peer needs and that may differ; JSON."""

    def __post_init__(self) -> None:
        """Raises errors.SettingsError if a value would not come back from JSON."""
        for name, value in [*self.settings.items(), *self.details.items()]:
            if not _is_json(value):
                raise errors.SettingsError(
                    f"{name} is {reprlib.repr(value)} ({type(value).__name__}), which a"
                    " Hello cannot carry as it is; it takes None, bool, int, finite"
                    " float, str, and lists and dicts of them with str as keys"
                )


@dataclasses.dataclass(frozen=True)
class Welcome:
    """The start of a run: all clusters are there, and it goes on after `step`."""

    step: int
    channels: bytes = b""  # of the listener, see `communication.agreement`


class Tensor(NamedTuple):
    """One encoded pytree: its leaves' bytes, one flat byte buffer each.

    On a channel with zstd a table of their lengths on the wire, 8 bytes each, and its
    own checksum come first; the length in the schema means that a buffer is not coded.
    """

    channel: int
    step: int
    micro_batch: int
    buffers: Sequence[Any]
    option: int = 0  # the number of the shape, of those that the channel's codec offers

    @property
    def is_end(self) -> bool:
        """True if this is no tensor but the end of the channel's tensors of a step.

        `micro_batch` is then their number, and the only buffer an identity of the batch
        (`channels.identity_bytes`), by which both sides compare what they train on.
        """
        return self.option == STEP_END


@dataclasses.dataclass(frozen=True)
class StepDone:
    """The step token of section 3.3."""

    step: int


@dataclasses.dataclass(frozen=True)
class Stop:
    """A request to the listener to stop; from the listener, the step to stop after."""

    step: int


@dataclasses.dataclass(frozen=True)
class Ping:
    """A sign of life, and an acknowledgement where no other frame is due."""

    activity: Activity = Activity.COMPUTING  # the activity of the sender's process
    done: int = 0  # a number that grows with what the sender's process gets done
    received: int = 0  # bytes of messages, not Pings, that the sender has received


@dataclasses.dataclass(frozen=True)
class End:
    """The sender's last message. (A closed connection alone is an error.)"""


@dataclasses.dataclass(frozen=True)
class Abort:
    """The end of a session because of an error, with its reason."""

    reason: str


Message = Hello | Welcome | Tensor | StepDone | Stop | Ping | End | Abort | Open
LAYOUTS: dict[type[Message], struct.Struct] = {
    Hello: struct.Struct(""),
    Welcome: struct.Struct("!Q"),
    Tensor: struct.Struct("!HQIB"),
    StepDone: struct.Struct("!Q"),
    Stop: struct.Struct("!Q"),
    Ping: struct.Struct("!BQQ"),
    End: struct.Struct(""),
    Abort: struct.Struct(""),
    Open: struct.Struct("!16sI"),
}
"""The typed header of each kind of message, in the order of KINDS."""
KINDS = tuple(LAYOUTS)
UNNUMBERED = (Open, Ping, Abort)
IN_CLEAR = (Welcome,)  # never encrypted: switches count by the channels' names
_NUMBERS = {kind: number for number, kind in enumerate(KINDS)}


class Head(NamedTuple):
    """The fixed part of a frame, verified."""

    kind: type[Message]
    sequence: int
    acknowledged: int
    payload_bytes: int
    payload_tag: bytes


def head_bytes(tags: Integrity = CHECKSUMS) -> int:
    """Returns the size of a head, its tags included."""
    return _FIELDS.size + 2 * tags.tag_bytes


def frame_bytes(
    kind: type[Message], payload_bytes: int = 0, tags: Integrity = CHECKSUMS
) -> int:
    """Returns the size of a whole frame."""
    return head_bytes(tags) + LAYOUTS[kind].size + payload_bytes


def tensor_bytes(message: Tensor) -> int:
    """Returns the size of a tensor's buffers together."""
    return sum(map(len, message.buffers))


def encode(
    message: Message, sequence: int, acknowledged: int, tags: Integrity = CHECKSUMS
) -> list[Any]:
    """Returns the frame of a message: buffers, of which no large one is copied.

    `sequence` is its number, 0 for one of UNNUMBERED; `acknowledged` counts the
    numbered frames received so far. Raises FrameError if a Hello is too large.
    """
    kind = type(message)
    fields, payload = _parts(message)
    size, header = sum(map(len, payload)), LAYOUTS[kind].pack(*fields)
    tags.next_frame()
    payload, tag = tags.protect(payload, in_clear=kind in IN_CLEAR)
    start = _FIELDS.pack(
        tags.magic, VERSION, _NUMBERS[kind], len(header), sequence, acknowledged, size
    )
    start += tag
    start += tags.head_tag(start + header) + header
    return [b"".join((start, *payload))] if size <= JOINED_BYTES else [start, *payload]


def _parts(message: Message) -> tuple[Sequence[Any], Sequence[Any]]:
    """Returns the fields of a message's typed header, and its payload."""
    if isinstance(message, Tensor):
        channel, step, micro_batch, buffers, option = message
        return (channel, step, micro_batch, option), buffers
    if isinstance(message, Welcome):
        return (message.step,), (message.channels,)
    if isinstance(message, Hello):
        return (), (_hello_bytes(message),)
    if isinstance(message, Abort):
        return (), (message.reason.encode("utf-8", "replace")[:MAX_REASON_BYTES],)
    return dataclasses.astuple(message), ()


def header_bytes(data: bytes | bytearray, tags: Integrity = CHECKSUMS) -> int:
    """Reads a typed header's length off a head; raises Damaged if it can be none."""
    magic, version, number, length = _FIELDS.unpack_from(data)[:4]
    if magic.startswith(TLS_RECORDS):
        raise Damaged(f"{magic!r} begins TLS: it is on there, and off here (tls)")
    if magic != tags.magic:
        raise Damaged(f"{magic!r} begins no frame")
    if version != VERSION:
        raise Damaged(f"a frame of version {version}; this is version {VERSION}")
    if number >= len(KINDS) or length != LAYOUTS[KINDS[number]].size:
        raise Damaged(f"a frame of kind {number} with a header of {length} bytes")
    return length


def decode_head(
    data: bytes | bytearray, header: bytes | bytearray, tags: Integrity = CHECKSUMS
) -> Head:
    """Verifies the head and the typed header of a frame, and reads the head.

    `data` are the first `head_bytes` of a frame. Raises Damaged if its tag is wrong.
    """
    tags.next_frame()
    start, tag = data[: -tags.tag_bytes], bytes(data[-tags.tag_bytes :])
    if not hmac.compare_digest(tags.head_tag(bytes(start + header)), tag):
        raise Damaged(f"the {tags.what} of a head is wrong")
    _, _, number, _, sequence, acknowledged, size = _FIELDS.unpack_from(start)
    payload_tag = bytes(start[_FIELDS.size :])
    return Head(KINDS[number], sequence, acknowledged, size, payload_tag)


def verify_payload(
    head: Head, payload: Sequence[Any], tags: Integrity = CHECKSUMS
) -> None:
    """Raises Damaged unless a payload is the one that was sent."""
    if not tags.is_whole(payload, head.payload_tag, in_clear=head.kind in IN_CLEAR):
        raise Damaged(f"the {tags.what} of a {head.kind.__name__}'s payload is wrong")


def decode(head: Head, header: bytes | bytearray, buffers: Sequence[Any]) -> Message:
    """Builds the message; raises FrameError if the contents do not fit the kind."""
    fields = LAYOUTS[head.kind].unpack(header)
    if head.kind is Tensor:
        channel, step, micro_batch, option = fields
        _check_step(head.kind, step)
        return Tensor(channel, step, micro_batch, buffers, option)
    if head.kind is Hello:
        return _hello(bytes(buffers[0]))
    if head.kind is Abort:
        reason = bytes(buffers[0]).decode("utf-8", "replace")
        return Abort(printable.line(reason, REASON_SHOWN))
    if head.kind is Ping:
        return _ping(*fields)
    if head.kind is Welcome:
        (step,) = fields
        _check_step(head.kind, step)
        return Welcome(step, bytes(buffers[0]))
    if head.kind in (StepDone, Stop):
        _check_step(head.kind, *fields)
    return head.kind(*fields)


def _check_step(kind: type[Message], step: int) -> None:
    if step > MAX_STEP:
        raise FrameError(
            f"sent a {kind.__name__} of step {step}; there is none beyond {MAX_STEP}"
        )


def _ping(number: int, done: int, received: int) -> Ping:
    try:
        return Ping(Activity(number), done, received)
    except ValueError:
        raise FrameError(f"sent a Ping with unknown activity {number}") from None


def _is_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) == value)
    except (TypeError, ValueError, RecursionError):
        return False


def _hello_bytes(message: Hello) -> bytes:
    fields = dataclasses.asdict(message)
    data = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    if len(data) > MAX_HELLO_BYTES:
        raise FrameError(f"our Hello has {len(data)} bytes; at most {MAX_HELLO_BYTES}")
    return data


def _hello(data: bytes) -> Hello:
    try:
        fields = strict_json.loads(data)
        hello = Hello(
            fields["cluster"],
            fields["version"],
            fields["settings"],
            tuple(fields["checkpoints"]),
            fields["details"],
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        raise FrameError("sent a Hello that cannot be read") from None
    typed = (
        isinstance(hello.cluster, str)
        and names.is_cluster(hello.cluster)
        and isinstance(hello.version, str)
        and isinstance(hello.settings, dict)
        and isinstance(hello.details, dict)
        and all(type(s) is int and 0 < s <= MAX_STEP for s in hello.checkpoints)
    )
    if not typed or len(fields) != 5:
        raise FrameError("sent a Hello with fields of the wrong type")
    return hello
