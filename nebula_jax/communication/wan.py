"""A slow line in the process: every cluster shapes what it sends.

The model is a link of a fixed rate with a fixed one-way delay: bytes leave one after
the other at the rate, and arrive the delay later, in order; they are handed over by the
slice, of a slow line ten times a second. TCP's own dynamics are not emulated: for these
the kernel shapes (`tc`), for those who are root.
"""

import collections
import dataclasses
import re
from typing import Any, NamedTuple

from nebula_jax import errors

LEAD = 0.02  # seconds before the line is idle that it takes more: a gap costs rate
SLICE_BYTES = 64 << 10  # 9 ms at 60 Mbit/s: waking for less would take from computing
SLICE_SECONDS = 0.1  # of a slow line: who waits for a large frame sees it come

_NUMBER = r"([0-9]{1,12}(?:\.[0-9]{1,12})?)"
_RATE = re.compile(_NUMBER + r"([kmg])bit", re.IGNORECASE)
_TIME = re.compile(_NUMBER + r"(ms|s)", re.IGNORECASE)
_CHANGE = re.compile(f"{_RATE.pattern}@{_TIME.pattern}", re.IGNORECASE)
_CUT = re.compile(f"cut={_TIME.pattern}@{_TIME.pattern}", re.IGNORECASE)
_UNITS = {"k": 1e3, "m": 1e6, "g": 1e9, "ms": 1e-3, "s": 1.0}


@dataclasses.dataclass(frozen=True)
class Line:
    """An emulated line, in one direction. `Line()` is no emulation at all."""

    rate: float = 0.0  # bits per second; 0 for unlimited
    delay: float = 0.0  # seconds, one way
    cuts: tuple[tuple[float, float], ...] = ()
    """(start, length) of cuts, in seconds since the first byte: nothing passes."""
    changes: tuple[tuple[float, float], ...] = ()
    """(start, rate): another rate from so many seconds after the first byte on."""


class Lines(NamedTuple):
    """An emulated line, in both directions."""

    up: Line = Line()  # from the connectors to the listener
    down: Line = Line()  # from the listener to the connectors


UNSHAPED = Line()


def from_string(text: str) -> Lines:
    """Reads a flag.

    `60mbit,15ms` is a rate and a one-way delay, of each direction. `cut=5s@20s`, as
    often as wanted, lets nothing pass for 5 s, 20 s after the first byte; `10mbit@60s`,
    as often as wanted, is the rate from 60 s after it on.
    `up:60mbit,15ms;down:170mbit,15ms` gives each direction its own; one that is not
    named is not emulated. Raises errors.SettingsError naming the part that cannot be
    read.
    """
    lines = {}
    for part in filter(None, text.split(";")):
        direction, colon, rest = part.strip().partition(":")
        if not colon:
            direction, rest = "both", part
        known = {"up": ("up",), "down": ("down",), "both": ("up", "down")}
        if direction not in known:
            raise errors.SettingsError(
                f"wan={text}: cannot read {direction!r}; directions are up (to the"
                " one who listens) and down"
            )
        for name in known[direction]:
            if name in lines:
                raise errors.SettingsError(f"wan={text}: names {name} twice")
            lines[name] = _line(rest, text)
    return Lines(**lines)


def _line(text: str, flag: str) -> Line:
    fields: dict[str, Any] = {"cuts": (), "changes": ()}
    value: Any  # of the type of the field `name`
    for part in filter(None, map(str.strip, text.split(","))):
        if match := _RATE.fullmatch(part):
            name, value = "rate", float(match[1]) * _UNITS[match[2].lower()]
        elif match := _TIME.fullmatch(part):
            name, value = "delay", _seconds(match, 1)
        elif match := _CUT.fullmatch(part):
            cut = (_seconds(match, 3), _seconds(match, 1))
            name, value = "cuts", (*fields.pop("cuts"), cut)
        elif match := _CHANGE.fullmatch(part):
            change = (_seconds(match, 3), float(match[1]) * _UNITS[match[2].lower()])
            name, value = "changes", (*fields.pop("changes"), change)
        else:
            raise errors.SettingsError(
                f"wan={flag}: cannot read {part!r}; write a rate such as 60mbit, a"
                " one-way delay such as 15ms, cut=5s@20s, or 10mbit@60s"
            )
        if name in fields:
            raise errors.SettingsError(f"wan={flag}: gives the {name} twice")
        fields[name] = value
    later = [rate for _, rate in fields["changes"]]
    if later and not all([fields.get("rate"), *later]):
        raise errors.SettingsError(
            f"wan={flag}: a rate that changes needs one that it begins with, and none"
            " of them can be 0"
        )
    times = [start for start, _ in fields["changes"]]
    if len(set(times)) < len(times):
        raise errors.SettingsError(f"wan={flag}: two rates begin at the same time")
    return Line(**fields)


def _seconds(match: re.Match, group: int) -> float:
    return float(match[group]) * _UNITS[match[group + 1].lower()]


class Shaper:
    """The emulated line: it keeps outgoing bytes until it would deliver them."""

    def __init__(self, line: Line) -> None:
        self._line = UNSHAPED if line == UNSHAPED else line
        self._first: float | None = None  # when the line was first used
        self._idle_from = 0.0  # when the line has sent all it was given
        self._delivered = 0.0  # when the newest byte arrives
        self._slices: collections.deque[tuple[float, memoryview]] = collections.deque()

    def put(self, buffer: Any, now: float) -> None:
        """Gives the line a buffer, which must not change until it was delivered."""
        view = memoryview(buffer).cast("B")
        if self._line is UNSHAPED:
            self._slices.append((now, view))
            return
        if self._first is None:
            self._first = now
        while len(view):
            begin = self._after_cut(max(self._idle_from, now))
            size = self._slice_bytes(begin) if self._line.rate else len(view)
            part, view = view[:size], view[size:]
            self._idle_from = self._sent(begin, len(part))
            arrival = self._after_cut(self._idle_from + self._line.delay)
            self._delivered = max(self._delivered, arrival)
            self._slices.append((self._delivered, part))

    def _slice_bytes(self, begin: float) -> int:
        """Returns how many bytes arrive at a time, if the first leaves at `begin`."""
        assert self._first is not None  # `put` has set it
        end, bits, rate = begin + SLICE_SECONDS, 0.0, self._line.rate
        for start, later in sorted(self._line.changes):
            change = min(self._first + start, end)
            if change > begin:
                bits, begin = bits + (change - begin) * rate, change
            rate = later
        bits += (end - begin) * rate
        return max(1, min(SLICE_BYTES, int(bits / 8)))

    def _sent(self, begin: float, size: int) -> float:
        """Returns when so many bytes have left, the first one at `begin`."""
        assert self._first is not None  # `put` has set it
        bits, rate = 8.0 * size, self._line.rate
        if not rate:
            return begin
        for start, later in sorted(self._line.changes):
            change = self._first + start
            if change > begin:
                if bits <= (change - begin) * rate:
                    break
                bits, begin = bits - (change - begin) * rate, change
            rate = later
        return begin + bits / rate

    def _after_cut(self, when: float) -> float:
        assert self._first is not None  # `put` has set it
        for start, length in sorted(self._line.cuts):
            if self._first + start <= when < self._first + start + length:
                when = self._first + start + length
        return when

    def ready(self, now: float) -> bool:
        """Returns True if the line will soon be idle, and the socket keeps up."""
        return self._idle_from <= now + LEAD and (
            not self._slices or self._slices[0][0] > now
        )

    def due(self, now: float) -> memoryview | None:
        """Returns the next bytes that have arrived by `now`, or None."""
        if self._slices and self._slices[0][0] <= now:
            return self._slices[0][1]
        return None

    def wrote(self, count: int) -> None:
        """Takes `count` bytes of what `due` returned off the line."""
        when, view = self._slices.popleft()
        if count < len(view):
            self._slices.appendleft((when, view[count:]))

    def wait(self, now: float) -> float | None:
        """Returns the seconds until something is due or `ready` changes, if ever."""
        times = [self._idle_from - LEAD] if self._idle_from - LEAD > now else []
        if self._slices:
            times.append(self._slices[0][0])
        return max(0.0, min(times) - now) if times else None

    def clear(self) -> None:
        """Drops what is on its way: the connection broke."""
        self._slices.clear()
        self._idle_from = self._delivered = 0.0

    @property
    def is_transparent(self) -> bool:
        """True if nothing is emulated, and nothing waits."""
        return not self._slices and self._line is UNSHAPED

    @property
    def empty(self) -> bool:
        """True if all bytes have been passed on."""
        return not self._slices
