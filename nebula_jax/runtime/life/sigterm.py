"""SIGTERM as an exception, so that what a command has started ends with it."""

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def as_exit() -> Iterator[None]:
    """Lets SIGTERM raise SystemExit in the block; as it is, no `finally` would run."""
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _exit(number: int, frame: FrameType | None) -> None:
    del frame
    # `timeout` sends it twice: the second would cut short what the first begins.
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)
