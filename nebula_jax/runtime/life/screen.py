"""The progress lines and messages of several clusters, on one screen."""

from collections.abc import Sequence

from rich import console as rich_console
from rich import live, text

from nebula_jax.runtime.life import process


class _Console(rich_console.Console):
    """A console that does not end the process when nobody reads it any more."""

    def on_broken_pipe(self) -> None:
        """Raises the error, as of any other write."""
        raise BrokenPipeError


class Screen:
    """A line per cluster, rewritten in place on a terminal; elsewhere plain lines."""

    def __init__(self, names: Sequence[str]) -> None:
        """Shows that the clusters `names` are starting."""
        self._console = _Console(stderr=False, highlight=False)
        self._lines = {name: f"{name:<13} starting" for name in names}
        self._live = None
        if self._console.is_terminal:
            self._live = live.Live(console=self._console, refresh_per_second=4)

    def __enter__(self) -> "Screen":
        if self._live:
            with process.for_people():
                self._live.start()
            self._live.update(self._all())
        return self

    def __exit__(self, *unused: object) -> None:
        if self._live:
            with process.for_people():
                self._live.stop()

    def _all(self) -> text.Text:
        return text.Text("\n".join(self._lines.values()), no_wrap=True)

    def progress(self, name: str, line: str) -> None:
        """Shows a cluster's newest progress line."""
        self._lines[name] = line
        if self._live:
            self._live.update(self._all())
        else:
            process.progress(line)

    def message(self, name: str, line: str) -> None:
        """Shows a cluster's message; of the launcher itself if `name` is empty."""
        line = f"[{name}] {line}" if name else line
        if self._live:
            with process.for_people():
                self._console.print(line, markup=False)
        else:
            process.message(line)
