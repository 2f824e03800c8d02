"""A slow line in the process: every cluster shapes what it sends.

The model is a link of a fixed rate with a fixed one-way delay: bytes leave one after
the other at the rate, and arrive the delay later. TCP's own dynamics are not emulated.
"""

import collections
import dataclasses
import re
from typing import Any

from nebula_jax import errors

LEAD = 0.02  # seconds before the line is idle that it takes more: a gap costs rate
SLICE_BYTES = 16 << 10  # 2 ms at 60 Mbit/s: fine enough, and few enough to be cheap

_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kmg])bit", re.IGNORECASE)
_DELAY = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s)", re.IGNORECASE)
_UNITS = {"k": 1e3, "m": 1e6, "g": 1e9, "ms": 1e-3, "s": 1.0}


@dataclasses.dataclass(frozen=True)
class Line:
    """What to emulate. `Line()` is no emulation at all."""

    rate: float = 0.0
    """Bits per second in each direction; 0 for unlimited."""
    delay: float = 0.0
    """Seconds, one way."""


UNSHAPED = Line()


def from_string(text: str) -> Line:
    """Reads a flag such as `60mbit,15ms`; an empty one is `Line()`.

    Raises:
      errors.NebulaError: naming the part that cannot be read.
    """
    rate = delay = 0.0
    for part in filter(None, text.split(",")):
        if match := _RATE.fullmatch(part.strip()):
            rate = float(match[1]) * _UNITS[match[2].lower()]
        elif match := _DELAY.fullmatch(part.strip()):
            delay = float(match[1]) * _UNITS[match[2].lower()]
        else:
            raise errors.NebulaError(
                f"--wan={text}: cannot read {part!r}; write a rate such as 60mbit"
                " and a one-way delay such as 15ms"
            )
    return Line(rate, delay)


class Shaper:
    """Holds outgoing bytes back until the emulated line would deliver them."""

    def __init__(self, line: Line):
        self._line = line
        self._idle_from = 0.0  # when the line has sent all it was given
        self._slices: collections.deque[tuple[float, memoryview]] = collections.deque()

    def put(self, buffer: Any, now: float) -> None:
        """Gives the line a buffer, which must not change until it was delivered."""
        view = memoryview(buffer).cast("B")
        if not self._line.rate:
            self._slices.append((now + self._line.delay, view))
            return
        for start in range(0, len(view), SLICE_BYTES):
            part = view[start : start + SLICE_BYTES]
            begin = max(self._idle_from, now)
            self._idle_from = begin + 8 * len(part) / self._line.rate
            self._slices.append((self._idle_from + self._line.delay, part))

    def ready(self, now: float) -> bool:
        """Whether the line will soon be idle, and the socket keeps up."""
        return self._idle_from <= now + LEAD and self.due(now) is None

    def due(self, now: float) -> memoryview | None:
        """The next bytes that have arrived by `now`, or None."""
        if self._slices and self._slices[0][0] <= now:
            return self._slices[0][1]
        return None

    def wrote(self, count: int) -> None:
        """`count` bytes of what `due` returned were passed on."""
        when, view = self._slices.popleft()
        if count < len(view):
            self._slices.appendleft((when, view[count:]))

    def wait(self, now: float) -> float | None:
        """Seconds until something is due or `ready` changes; None if neither will."""
        times = [self._idle_from - LEAD] if self._idle_from - LEAD > now else []
        if self._slices:
            times.append(self._slices[0][0])
        return max(0.0, min(times) - now) if times else None

    @property
    def empty(self) -> bool:
        """Whether all bytes have been passed on."""
        return not self._slices
