"""The life of a process: its messages, its signals, its errors, its exit status.

0        done
1        an error, reported in one line
2        settings that cannot work
3        stopped for a peer; saved
4        ended because a peer did, or did not come; the peer is to blame
128 + n  stopped by signal n; saved, unless it waited for a lost peer
"""

import contextlib
import io
import os
import pathlib
import re
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, NoReturn

from nebula_jax import errors, printable, strict_json
from nebula_jax.communication.wire import session
from nebula_jax.runtime.life import memory

STOPPED_BY_PEER = 3
ENDED_BY_PEER = 4
SAVED = (0, STOPPED_BY_PEER, 128 + signal.SIGINT, 128 + signal.SIGTERM)
"""The statuses of a process that ended as it should."""

LIFELINE_FD = "NEBULA_LIFELINE_FD"  # set by the launcher: closes when it is gone
PROGRESS_MARK = "\x1e"  # in front of a progress line, for the launcher
TWICE_SECONDS = 0.5
"""Signals so soon after each other are one request to stop: `timeout` sends its own to
the process, and then to the group."""
LOG_FORMATS = ("text", "json")

_unread: set[str] = set()  # standard streams that lost something for people
_log_format = [LOG_FORMATS[0]]  # the format of this process's progress lines


@contextlib.contextmanager
def for_people(stream: str = "stdout") -> Iterator[None]:
    """Lets a run go on where what people follow it by is lost, as on a full disk."""
    try:
        yield
    except (OSError, ValueError):
        _unread.add(stream)


def message(text: str) -> None:
    """Prints a message on standard error, apart from progress lines."""
    with for_people("stderr"):
        print(printable.lines(text), file=sys.stderr, flush=True)


def log_as(log_format: str) -> None:
    """Prints progress from now on as `text`, or as a `json` object a line."""
    _log_format[:] = [log_format]


def is_json() -> bool:
    """Returns True if what this process prints is read by a program."""
    return _log_format == ["json"]


def progress(line: str, record: Mapping[str, Any] | None = None) -> None:
    """Prints a line of a run's progress on standard output; see `formatted`."""
    print_line(formatted(line, record))


def formatted(line: str, record: Mapping[str, Any] | None = None) -> str:
    """Returns a line for people, or its `record` as JSON, as this process prints."""
    if is_json():
        line = strict_json.dumps({"text": line} if record is None else record)
    # The launcher leaves out some of these, and nothing else that a process prints.
    return PROGRESS_MARK + line if LIFELINE_FD in os.environ else line


def print_line(line: str) -> None:
    """Prints a line on standard output as it is."""
    with for_people():
        print(line, flush=True)


def age() -> float:
    """Returns the seconds since this process started; 0 where the system hides it."""
    try:
        fields = pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # 22nd of proc(5)
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (AttributeError, OSError, ValueError, IndexError):
        return 0.0


def replace_unencodable() -> None:
    """Has `?` printed for what standard output cannot encode, as `→` in Latin-1."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def drop_unread() -> None:
    """Drops unread output: to write it would fail as Python ends, with status 120."""
    for name in _unread:
        stream = getattr(sys, name)
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as it:
                os.dup2(it.fileno(), stream.fileno())


def handed_down(variable: str, is_kind: Callable[[int], bool]) -> int:
    """Returns the descriptor whose number the launcher has put into the environment.

    Raises errors.SettingsError if it is no number of a file whose mode `is_kind`.
    """
    value = os.environ[variable]
    with contextlib.suppress(OSError):
        if re.fullmatch("[0-9]{1,9}", value) and is_kind(os.fstat(int(value)).st_mode):
            return int(value)
    raise errors.SettingsError(
        f"{variable}={ascii(value)[1:-1]} in the environment: the launcher sets it for"
        " its processes, to the number of an open descriptor; unset it"
    )


@contextlib.contextmanager
def timed(what: str) -> Iterator[None]:
    """Reports how long something took that a person waits for."""
    start = time.monotonic()
    yield
    message(f"{what}: {time.monotonic() - start:.1f} s")


class Stopped(errors.NebulaError):
    """The end by a signal, `number`, of a process that waited for a lost peer."""

    def __init__(self, text: str, number: int) -> None:
        super().__init__(text)
        self.number = number


class Interrupt:
    """A request to stop: Ctrl-C, SIGTERM, or the launcher gone. The second is final."""

    def __init__(self) -> None:
        self._signal: int | None = None
        self._since = 0.0
        self._before: dict[int, Any] = {}
        self._heard: tuple[socket.socket, ...] = ()
        self.is_graceful = False  # True while there is something to save

    def install(self) -> "Interrupt":
        """Catches signals; raises errors.SettingsError if LIFELINE_FD is another's."""
        # Elsewhere, such as in a notebook's thread, nobody can catch signals.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._on_signal)
        if LIFELINE_FD in os.environ:
            fd = handed_down(LIFELINE_FD, stat.S_ISFIFO)
            threading.Thread(target=self._watch, args=(fd,), daemon=True).start()
        return self

    def hear(self) -> None:
        """Lets other threads see `number` during a collective, when no handler runs."""
        if self._before:  # else it is no main thread
            self._heard = socket.socketpair()
            for each in self._heard:
                each.setblocking(False)
            signal.set_wakeup_fd(self._heard[1].fileno(), warn_on_full_buffer=False)

    def uninstall(self) -> None:
        """Gives the signals back to whoever had them before `install`."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        is_first = self._signal is None
        if not is_first and time.monotonic() < self._since + TWICE_SECONDS:
            return
        if not is_first or not self.is_graceful:
            if not is_first:
                message("stopped again: ends at once, without another checkpoint")
            # As if nobody had caught it: there is nothing (more) to save.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._signal, self._since = number, time.monotonic()

    def _watch(self, fd: int) -> None:
        os.read(fd, 1)  # returns when the launcher's end is closed, however it died
        os.kill(os.getpid(), signal.SIGTERM)

    def requested(self) -> bool:
        """Returns True if the run should end soon."""
        return self._signal is not None

    @property
    def number(self) -> int | None:
        """The signal that requested it, if any; see `hear`."""
        if self._signal is None and self._heard:
            with contextlib.suppress(BlockingIOError):
                return self._heard[0].recv(1, socket.MSG_PEEK)[0]
        return self._signal

    def request(self, number: int) -> None:
        """Requests the end for another process of the cluster, which got a signal."""
        if self._signal is None and self.is_graceful:
            self._signal = number

    def end_wait(self, cluster: str, peer: str) -> None:
        """Raises Stopped, if the run should end: no step comes that all could save."""
        if self._signal is not None:
            raise Stopped(
                f"{cluster}: stopped by {signal.Signals(self._signal).name} while it"
                f" waited for {peer}, whose connection is lost; the same command goes"
                " on from what all clusters have saved",
                self._signal,
            )

    def exit_status(
        self, cluster: str, step: int, steps: int, folder: pathlib.Path | None = None
    ) -> int:
        """Returns a cluster's status; reports its last step, and folder, if early."""
        if step >= steps:
            return 0
        who = signal.Signals(self._signal).name if self._signal else "another cluster"
        where = f", saved in {folder}" if folder else ""
        message(
            f"{cluster}: stopped after step {step} by {who}{where}; the same command"
            f" goes on with step {step + 1}"
        )
        return 128 + self._signal if self._signal else STOPPED_BY_PEER


@contextlib.contextmanager
def sigterm_as_exit() -> Iterator[None]:
    """Lets SIGTERM raise SystemExit in the block: else no `finally` would run."""
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


def guarded(
    main: Callable[[], int], report: Callable[[str], None] = lambda reason: None
) -> int:
    """Runs a process's work, returns its status; an error is one line, and reported."""
    replace_unencodable()
    try:
        return main()
    except KeyboardInterrupt:
        message("interrupted")
        return 128 + signal.SIGINT
    except (errors.NebulaError, OSError) as error:
        report(str(error))
        if isinstance(error, Stopped):
            message(str(error))
            return 128 + error.number
        message(f"error: {error}")
        if isinstance(error, errors.SettingsError):
            return 2
        gone = (session.PeerGone, session.PeerAborted, errors.PeerAbsent)
        return ENDED_BY_PEER if isinstance(error, gone) else 1
    except (RuntimeError, MemoryError) as error:
        if not (found := memory.in_words(error)):
            raise
        report(found)
        message(f"error: {found}; {memory.REMEDY}")
        return 1


def exit_now(status: int) -> NoReturn:
    """Ends this process without waiting for anything."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # it may have no reader
            stream.flush()
    os._exit(status)
