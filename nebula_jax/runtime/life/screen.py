"""The progress lines and messages of several clusters, on one screen.

On a terminal a line per cluster is rewritten in place. Into a pipe or a file each
cluster writes one now and then, and its last; of a program that reads JSON, all.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Sequence

from rich import console as rich_console
from rich import live, text

from nebula_jax.runtime.life import process

STEP = " step "  # in a progress line of a step, not of a phase before the first
QUIET_SECONDS = 30.0  # between lines of a cluster where no terminal shows them
AGED_SECONDS = 2.0  # seconds after which a line on a terminal is shown with its age


class Lines:
    """The progress lines of clusters where no terminal shows them: few of many."""

    def __init__(
        self,
        seconds: float = QUIET_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begins without a line; `seconds` are those between two of a cluster."""
        self._seconds, self._clock = seconds, clock
        self._newest: dict[str, str] = {}  # those that were not shown
        self._shown: dict[str, float] = {}
        self._have_stepped: set[str] = set()

    def add(self, name: str, line: str) -> None:
        """Takes a cluster's newest line; shows it if it is time, or its first step."""
        if STEP in line and name not in self._have_stepped:
            self._have_stepped.add(name)
            self._shown.pop(name, None)  # of a phase before it
        self._newest[name] = line
        self.tick()

    def tick(self) -> None:
        """Shows the newest line of each cluster that has shown none for so long."""
        now = self._clock()
        for name in list(self._newest):
            if now - self._shown.get(name, -math.inf) >= self._seconds:
                self._shown[name] = now
                process.print_line(self._newest.pop(name))

    def flush(self) -> None:
        """Shows the newest line of each cluster, unless it was shown."""
        while self._newest:
            process.print_line(self._newest.pop(next(iter(self._newest))))


def own_lines() -> Lines:
    """Returns the lines of a process alone: all for a terminal, program or launcher."""
    is_read = process.is_json() or process.LIFELINE_FD in os.environ
    return Lines(0.0 if is_read or sys.stdout.isatty() else QUIET_SECONDS)


class _Console(rich_console.Console):
    """A console that does not end the process when nobody reads it any more."""

    def on_broken_pipe(self) -> None:
        """Raises the error, as of any other write."""
        raise BrokenPipeError


class Screen:
    """A line per cluster, rewritten in place on a terminal; elsewhere `Lines`."""

    def __init__(
        self, names: Sequence[str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Shows that the clusters `names` are importing what they need."""
        self._console = _Console(stderr=False, highlight=False)
        self._clock = clock
        # Name -> line, and since when it holds.
        self._lines = {name: (f"{name:<13} importing", clock()) for name in names}
        self._others = Lines(0.0 if process.is_json() else QUIET_SECONDS, clock)
        self._live = None
        if self._console.is_terminal and not process.is_json():
            self._live = live.Live(
                console=self._console, get_renderable=self._all, refresh_per_second=4
            )

    def __enter__(self) -> "Screen":
        if self._live:
            with process.for_people():
                self._live.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self._others.flush()
        if self._live:
            with process.for_people():
                self._live.stop()

    def _all(self) -> text.Text:
        """Returns all lines, those that are not new with their age."""
        shown = []
        for line, since in self._lines.values():
            age = self._clock() - since
            shown.append(f"{line}  ({age:.0f} s)" if age >= AGED_SECONDS else line)
        return text.Text("\n".join(shown), no_wrap=True)

    def tick(self) -> None:
        """Shows what it is time for; to be called now and then."""
        self._others.tick()

    def progress(self, name: str, line: str) -> None:
        """Shows a cluster's newest progress line."""
        self._lines[name] = line, self._clock()
        if not self._live:
            self._others.add(name, line)

    def message(self, name: str, line: str) -> None:
        """Shows a cluster's message; of the launcher itself if `name` is empty."""
        if not name:  # it concerns all: what they have said before comes before
            self._others.flush()
        line = f"[{name}] {line}" if name else line
        if self._live:
            self.output(line)
        else:
            process.message(line)

    def output(self, line: str) -> None:
        """Shows what a cluster has printed beside its progress."""
        if self._live:
            with process.for_people():
                self._console.print(line, markup=False)
        else:
            process.print_line(line)
