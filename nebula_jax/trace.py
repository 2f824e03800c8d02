"""A trace: what a process did and when, as spans on lanes, and where its time went.

    trace = Trace(is_on=True)
    trace.begin()
    with trace.span("compute", step=7):
        state, metrics = trace.ready(step(state, batch))
    trace.write(path, "generator:0")        # opens in ui.perfetto.dev

The format is Chrome's "Trace Event Format" in JSON, which Perfetto and chrome://tracing
read. The span of a lane within another one belongs to it; in the ledger of time each
second counts once, for the innermost span. A trace that is off costs nothing.
"""

import collections
import contextlib
import json
import pathlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

from nebula_jax import files

MOST_SPANS = 500_000  # that are kept, some 100 MB of JSON; the ledger counts all
MAIN = "loop"  # the lane of the process's own loop

Item = TypeVar("Item")


class Span(NamedTuple):
    """An activity from one time to another."""

    lane: str
    name: str
    begin: float  # seconds of the clock
    end: float
    about: dict[str, Any]  # JSON values


class Ledger(NamedTuple):
    """The time of a process, by what it did."""

    seconds: float  # from `begin` on
    cpu_seconds: float  # those of all cores, from `begin` or `lump` on
    parts: dict[str, float]  # name of a span -> seconds in it, and in none within it

    @property
    def other(self) -> float:
        """The seconds in no span."""
        return self.seconds - sum(self.parts.values())


class Trace:
    """The spans of one process."""

    def __init__(
        self, is_on: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begins without a span, in the thread that has the process's loop."""
        self.is_on = is_on
        self._clock, self._to_epoch = clock, time.time() - clock()
        self._spans: list[Span] = []
        self._dropped = 0
        self._loop = threading.get_ident()  # the thread whose time the ledger has
        self._begin = self._begin_cpu = 0.0
        self._parts: dict[str, float] = collections.defaultdict(float)
        self._within: list[float] = []  # seconds in spans within the open ones

    def begin(self) -> None:
        """Begins the ledger: it has the time from now on; within no span."""
        self._begin, self._begin_cpu = self._clock(), time.process_time()
        self._parts.clear()

    def lump(self, name: str) -> None:
        """Makes one part of the ledger of all the time so far; within no span."""
        self._parts.clear()
        self._parts[name] = self._clock() - self._begin
        self._begin_cpu = time.process_time()

    @contextlib.contextmanager
    def span(self, name: str, **about: Any) -> Iterator[None]:
        """Records what is done meanwhile as a part of the ledger; `about` is JSON."""
        if not self.is_on:
            yield
            return
        is_loop, begin = threading.get_ident() == self._loop, self._clock()
        if is_loop:
            self._within.append(0.0)
        try:
            yield
        finally:
            end = self._clock()
            if is_loop:
                self._parts[name] += end - begin - self._within.pop()
                if self._within:
                    self._within[-1] += end - begin
            lane = MAIN if is_loop else threading.current_thread().name
            self.add(lane, name, begin, end, **about)

    def each(self, name: str, items: Iterable[Item]) -> Iterator[Item]:
        """Yields items; getting each of them is a span."""
        iterator = iter(items)
        while True:
            with self.span(name):
                item = next(iterator, iterator)
            if item is iterator:
                return
            yield item  # type: ignore[misc]

    def add(self, lane: str, name: str, begin: float, end: float, **about: Any) -> None:
        """Records a span of any thread, on a lane of its own, which no ledger has."""
        if not self.is_on:
            return
        if len(self._spans) < MOST_SPANS:
            self._spans.append(Span(lane, name, begin, end, about))
        else:
            self._dropped += 1

    def ready(self, arrays: Item) -> Item:
        """Waits for arrays if the trace is on, so that their time is the span's."""
        if not self.is_on:
            return arrays
        import jax  # not by a switch, which has frames to read, and no arrays

        return jax.block_until_ready(arrays)

    @property
    def ledger(self) -> Ledger:
        """The time since `begin`."""
        cpu_seconds = time.process_time() - self._begin_cpu
        return Ledger(self._clock() - self._begin, cpu_seconds, dict(self._parts))

    def write(self, path: pathlib.Path, process: str) -> None:
        """Writes all spans as a JSON file of trace events; it shows `process`."""
        named = [("process_name", 0, process)]
        lanes = {MAIN: 1}
        for span in self._spans:
            lanes.setdefault(span.lane, len(lanes) + 1)
        named += [("thread_name", number, lane) for lane, number in lanes.items()]
        events = [
            {"ph": "M", "name": kind, "pid": 1, "tid": number, "args": {"name": name}}
            for kind, number, name in named
        ]
        for lane, name, begin, end, about in self._spans:
            event = {"ph": "X", "name": name, "pid": 1, "tid": lanes[lane]}
            event["ts"] = round(1e6 * (begin + self._to_epoch), 1)
            event["dur"] = round(1e6 * (end - begin), 1)
            events.append(event | ({"args": about} if about else {}))
        write_events(path, events, self._dropped)


OFF = Trace()  # a trace that records nothing


def write_events(
    path: pathlib.Path, events: list[dict[str, Any]], dropped: int = 0
) -> None:
    """Writes a file of trace events; `dropped` spans were too many."""
    whole = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"spans not kept": dropped},
    }
    with files.writing(path) as partial:
        partial.write_text(json.dumps(whole, separators=(",", ":")))


def merge(parts: Iterable[pathlib.Path], path: pathlib.Path) -> None:
    """Writes the traces of several processes, of `Trace.write`, as one file."""
    events, dropped = [], 0
    for number, part in enumerate(parts, 1):
        read = json.loads(part.read_text())
        dropped += read["otherData"]["spans not kept"]
        events += [each | {"pid": number} for each in read["traceEvents"]]
    write_events(path, events, dropped)
