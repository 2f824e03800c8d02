"""The life of a process: its folder, its signals, its errors, its exit status.

0        done
1        an error, said in one line
2        bad flags
3        stopped for a peer; saved
4        ended because a peer did; the peer is to blame
128 + n  stopped by signal n; saved
"""

import contextlib
import fcntl
import os
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

from absl import app, flags, logging

from experiments import shared_flags
from nebula_jax import errors
from nebula_jax.communication.wire import session

STOPPED_BY_PEER = 3
ENDED_BY_PEER = 4

LIFELINE_FD = "NEBULA_LIFELINE_FD"  # set by the launcher: closes when it is gone


class Interrupt:
    """A request to stop: Ctrl-C, SIGTERM, or the launcher gone. The second is final."""

    def __init__(self):
        self._signal: int | None = None
        self.is_graceful = False
        """Whether there is something to save; else the first request is final too."""

    def install(self) -> "Interrupt":
        """Catches the signals of this process, and watches the launcher's lifeline."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        if LIFELINE_FD in os.environ:
            fd = int(os.environ[LIFELINE_FD])
            threading.Thread(target=self._watch, args=(fd,), daemon=True).start()
        return self

    def _on_signal(self, number, frame) -> None:
        del frame
        if self._signal is not None or not self.is_graceful:
            # As if nobody had caught it: there is nothing (more) to save.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._signal = number

    def _watch(self, fd: int) -> None:
        os.read(fd, 1)  # returns when the launcher's end is closed, however it died
        os.kill(os.getpid(), signal.SIGTERM)

    @property
    def requested(self) -> bool:
        """Whether the run should end soon."""
        return self._signal is not None

    @property
    def status(self) -> int:
        """Exit status of a run that ended early."""
        return 128 + self._signal if self._signal else STOPPED_BY_PEER


def exit_status(step: int, interrupt: Interrupt) -> int:
    """Exit status of a cluster whose last step was `step`, all saved."""
    if step >= shared_flags.STEPS.value:
        return 0
    cluster = shared_flags.CLUSTER.value
    say(f"{cluster}: stopped after step {step}; the same command goes on")
    return interrupt.status


@contextlib.contextmanager
def alone_in(folder: pathlib.Path) -> Iterator[None]:
    """Holds a folder for this process alone.

    Raises:
      errors.NebulaError: if another process works in it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise errors.NebulaError(
                f"another process works in {folder}; wait for it, or name another"
                " --workdir"
            ) from None
        yield


def say(text: str) -> None:
    """A message for a person, apart from the progress lines on standard output."""
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def timed(what: str) -> Iterator[None]:
    """Says how long something took that a person waits for."""
    start = time.monotonic()
    yield
    say(f"{what}: {time.monotonic() - start:.1f} s")


def run(main: Callable[[], int]) -> None:
    """Entry point of an experiment: parses flags, and prints errors as one line.

    Args:
      main: does the work, returns the exit status.
    """

    def parse(argv):
        try:
            return flags.FLAGS(argv)
        except (flags.Error, UnicodeDecodeError) as error:
            say("error: " + " ".join(str(error).split()))
            sys.exit(2)

    def guarded(argv):
        logging.set_verbosity(logging.WARNING)  # the libraries' chatter
        if len(argv) > 1:
            say(f"error: what is {argv[1]!r}? Every argument is a --flag")
            return 2
        try:
            return main()
        except shared_flags.FlagError as error:
            say(f"error: {error}")
            return 2
        except (session.PeerGone, session.PeerAborted) as error:
            say(f"error: {error}")
            return ENDED_BY_PEER
        except (errors.NebulaError, OSError) as error:
            say(f"error: {error}")
            return 1
        except KeyboardInterrupt:
            say("interrupted before training began")
            return 128 + signal.SIGINT

    app.run(guarded, flags_parser=parse)
