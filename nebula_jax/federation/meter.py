"""The meter of one direction of a stream: the kinds of frames that pass, their bytes.

A switch reads heads and lets everything else by. A stream begins with the TLS records
in which its trainers agree on keys; sealed frames follow. Kinds are the names of frames
(`Hello`, `StepDone`), and for tensors those of their channels (`tokens`), which the
listener's Welcome has. A frame that is no tensor is no longer than it can be, and one
with a payload of its own (`Hello`, `Welcome`, `Abort`) comes once: no more than that
passes beside the kinds that a policy names.
"""

import json
import struct
from collections.abc import Callable

from nebula_jax import errors, printable, strict_json
from nebula_jax.communication.wire import frames, reader
from nebula_jax.security import policy, seal
from nebula_jax.security.audit import entries

HANDSHAKE = "handshake"
MOST_HANDSHAKE = 1 << 16  # bytes of TLS in a direction
_RECORD = struct.Struct("!BHH")  # of TLS: kind, version, length
_RECORD_KINDS = range(20, 24)
_FIELDS = struct.Struct("!4sBBHQQQ")
_HEAD_BYTES = frames.head_bytes(seal.Seal(bytes(seal.KEY_BYTES)))
_CHANNEL = struct.Struct("!H")
_SESSION_BYTES = 16  # the first of an Open's header
_LONGEST_NAME = 64  # characters of a channel's
_LONGEST_CODEC = 500  # as a codec string's
MOST_PAYLOAD = 1 << 40  # bytes of a tensor; sums stay numbers that the audit log takes
MOST_KINDS = 4096  # on one stream: each is an entry of the audit log
MOST_SESSIONS = 1000  # whose names are kept
MOST_NAMES = 1 << 24  # characters in all; a Welcome may add 6 MiB: they fit a `Store`


class Unreadable(errors.NebulaError):
    """A stream that is neither a handshake nor sealed frames."""


Channels = list[list[str]]  # name and codec of each channel that a side sends on
Known = dict[str, list[Channels]]  # session -> the listener's, then the connector's

Admit = Callable[[str, int], None]  # (kind of a frame, its bytes); see `Meter`
Passed = Callable[[int], None]  # (bytes); see `Meter`


class Names:
    """The names of the channels of one stream, which are those of its session.

    A session has a Welcome once, and may go on over many streams.
    """

    def __init__(
        self,
        known: Known | None = None,
        check: Callable[[list[Channels]], None] = lambda sides: None,
    ) -> None:
        """Starts before the first frame; changes `known` in place.

        `check` is given the channels of both sides when they are known, and before each
        tensor crosses; it raises errors.NebulaError if they may not.
        """
        self._known: Known = {} if known is None else known
        self._check = check
        self._session = ""

    def begin(self, session_id: bytes) -> None:
        """Takes the session that a stream belongs to."""
        self._session = session_id.hex()

    def learn(self, welcome: bytes) -> None:
        """Takes the names from the payload of a listener's Welcome."""
        if not self._session:
            raise Unreadable("a Welcome before an Open")
        try:
            sides = [
                [(each["name"], each["codec"]) for each in side]
                for side in strict_json.loads(welcome)
            ]
            sent, received = sides
        except (ValueError, KeyError, TypeError):
            raise Unreadable("a Welcome that cannot be read") from None
        self._known.pop(self._session, None)
        # Written once: one Welcome may drive out a thousand sessions of others.
        sizes = {each: len(json.dumps(sides)) for each, sides in self._known.items()}
        while len(sizes) >= MOST_SESSIONS or sum(sizes.values()) > MOST_NAMES:
            oldest = next(iter(sizes))
            del sizes[oldest], self._known[oldest]
        self._known[self._session] = [
            [
                [
                    entries.without_secret(printable.line(str(name), _LONGEST_NAME)),
                    printable.line(str(codec), _LONGEST_CODEC),
                ]
                for name, codec in side
            ]
            for side in (sent, received)
        ]
        self._check(self._known[self._session])

    def of(self, is_listener: bool) -> list[str]:
        """Returns the names of the channels on which a side sends.

        Raises errors.NebulaError if they may not cross, by the policy of now.
        """
        found = self._known.pop(self._session, None)
        if found is None:
            return []
        self._known[self._session] = found  # the last of all to be forgotten
        self._check(found)
        return [name for name, _ in found[0 if is_listener else 1]]


class Meter:
    """A count of what passes in one direction of one stream."""

    def __init__(
        self, names: Names, is_listener: bool, admit: Admit, passed: Passed
    ) -> None:
        """Starts before the first byte; both directions of a stream share `names`.

        The listener sends in this direction if `is_listener`. `admit` is given the kind
        of a frame and its bytes, before any of them is passed on, and raises
        errors.NebulaError if they may not pass; `passed` is given how many bytes do,
        since a head may claim more than ever comes.
        """
        self.seen: dict[str, list[int]] = {}
        """Kind -> [frames, bytes]; until `end` a frame counts whole at its head."""
        self._names, self._is_listener = names, is_listener
        self._admit, self._passed = admit, passed
        self._head = bytearray()
        self._left = 0  # bytes of the present frame that are still to come
        self._kind = ""  # of the present frame
        self._welcome: bytearray | None = None
        self._handshake = 0
        self._had: set[type[frames.Message]] = set()

    def feed(self, data: bytes | memoryview) -> None:
        """Takes the next bytes, before they are passed on.

        Raises Unreadable if they are no stream of ours; errors.NebulaError as `admit`.
        """
        view = memoryview(data)
        while len(view):
            if self._left:
                passed = view[: self._left]
                self._pass(passed)
                view = view[len(passed) :]
                continue
            missing = self._missing()
            self._head += view[:missing]
            view = view[missing:]
            if not self._missing():
                self._begin()

    def end(self) -> int:
        """Ends the count; returns the bytes that were admitted and will not come."""
        missing, self._left = self._left, 0
        if missing:
            self.seen[self._kind][1] -= missing
        return missing

    def _missing(self) -> int:
        """Returns how many bytes more a head needs before it can be read."""
        head = self._head
        if not head:
            return 1
        if head[0] in _RECORD_KINDS:
            return max(0, _RECORD.size - len(head))
        if len(head) < _FIELDS.size:
            return _FIELDS.size - len(head)
        return _HEAD_BYTES + _READ_FURTHER.get(head[5], 0) - len(head)

    def _begin(self) -> None:
        """Reads a head, and lets its frame begin."""
        head, self._head = bytes(self._head), bytearray()
        if head[0] in _RECORD_KINDS:
            kind, total = self._record(head)
        else:
            kind, total = self._frame(head)
        if kind not in self.seen and len(self.seen) >= MOST_KINDS:
            raise Unreadable(f"more than {MOST_KINDS} kinds of frames on one stream")
        self._admit(kind, total)
        count = self.seen.setdefault(kind, [0, 0])
        count[0] += 1
        count[1] += total
        self._kind, self._left = kind, total - len(head)
        self._passed(len(head))

    def _record(self, head: bytes) -> tuple[str, int]:
        _, version, length = _RECORD.unpack(head)
        self._handshake += _RECORD.size + length
        if version >> 8 != 3 or self._handshake > MOST_HANDSHAKE:
            raise Unreadable("a handshake without an end")
        return HANDSHAKE, _RECORD.size + length

    def _frame(self, head: bytes) -> tuple[str, int]:
        magic, version, number, length, _, _, payload = _FIELDS.unpack_from(head)
        if magic != seal.MAGIC or version != frames.VERSION:
            raise Unreadable("a frame that is not sealed, or of another version")
        if number >= len(frames.KINDS):
            raise Unreadable(f"a frame of kind {number}")
        kind = frames.KINDS[number]
        if length != frames.LAYOUTS[kind].size:
            raise Unreadable(f"a {kind.__name__} with a header of {length} bytes")
        total = _HEAD_BYTES + length + payload
        is_tensor = kind is frames.Tensor
        most = MOST_PAYLOAD if is_tensor else reader.PAYLOAD_LIMITS.get(kind, 0)
        if payload > most:
            raise Unreadable(
                f"a {kind.__name__} with a payload of {payload} bytes; at most {most}"
            )
        if is_tensor:
            (channel,) = _CHANNEL.unpack_from(head, _HEAD_BYTES)
            return self._channel(channel), total
        if most and kind in self._had:
            raise Unreadable(f"a second {kind.__name__} on one stream")
        self._had.add(kind)
        if kind is frames.Open:
            self._names.begin(head[_HEAD_BYTES:])
        if kind is frames.Welcome:
            self._welcome = bytearray()
            self._welcome_from = length
        return kind.__name__, total

    def _channel(self, number: int) -> str:
        names = self._names.of(self._is_listener)
        if number >= len(names):
            raise Unreadable(f"a tensor on channel {number}, of {len(names)}")
        if names[number] in policy.STEERING:  # every policy lets those pass
            raise Unreadable(f"a tensor on a channel named {names[number]}")
        return names[number]

    def _pass(self, passed: memoryview) -> None:
        self._left -= len(passed)
        self._passed(len(passed))
        if self._welcome is not None:
            self._welcome += passed
            if not self._left:
                if self._is_listener:
                    self._names.learn(bytes(self._welcome[self._welcome_from :]))
                self._welcome = None


_READ_FURTHER = {
    frames.KINDS.index(frames.Tensor): _CHANNEL.size,
    frames.KINDS.index(frames.Open): _SESSION_BYTES,
}
"""Kind -> bytes of its typed header that are read."""
