"""The processes of a cluster, as one of them watches over the others.

A process whose connection closes is gone. One that does not beat is stopped, or its
host is. If all of them beat and none moves, somebody hangs: every beat has the step at
which its process is, and if that has not moved for a while also the line of our code.
"""

import contextlib
import pathlib
import sys
import threading
import time
from collections.abc import Callable

import nebula_jax
from nebula_jax import printable
from nebula_jax.communication.wire import activity
from nebula_jax.runtime.life import process
from nebula_jax.runtime.ranks import rendezvous

ROOT = pathlib.Path(nebula_jax.__file__).parents[1]
BEAT_SECONDS = 0.5
STANDSTILL_SECONDS = 2.0  # that a beat is late
LOOK_SECONDS = 10.0  # between two looks at the line of code, at most
LOOKS = 10  # of them until a cluster that does not move is ended
LAST_WORDS_SECONDS = 5.0  # until it is clear why a collective has failed


class Members:
    """The processes of this cluster, as one of them sees the others."""

    def __init__(self, rank: int, peer_timeout: float) -> None:
        self.rank, self._peer_timeout = rank, peer_timeout
        self.reason = ""  # why the cluster has ended, once it has
        self.have_left = False  # True once all processes have done their work
        self.work, self.interrupt = activity.Work(), process.Interrupt()
        self.aborts: list[Callable[[str], None]] = []
        self._lines: dict[int, rendezvous.Line] = {}
        self._heard: dict[int, float] = {}
        self._at: dict[int, tuple[int, str]] = {}  # steps done, and a line of code
        self._moved: dict[int, float] = {}  # when that was last another one
        self._left: set[int] = set()
        self._since = time.monotonic()
        self._has_ended = threading.Event()
        self._is_leaving = False

    def watch(self, lines: dict[int, rendezvous.Line]) -> None:
        """Watches over the processes at the other ends of `lines` from now on."""
        self._lines = lines
        for rank, line in lines.items():
            self._heard[rank] = time.monotonic()
            threading.Thread(target=self._read, args=(rank, line), daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()

    def leave(self) -> None:
        """Waits until all processes have done their work."""
        self._is_leaving = True
        if self.rank:
            self._send({"leave": True})
        while not self.reason and self._left != self._lines.keys():
            time.sleep(BEAT_SECONDS / 10)
        if self.reason:
            raise rendezvous.Absent(self.reason)
        self._send({"leave": True})
        self._has_ended.set()
        self.have_left = True

    def fail(self, reason: str) -> None:
        """Reports to the others that this process has failed."""
        self._has_ended.set()
        self._send({"end": self.reason or f"process {self.rank} failed: {reason}"})

    def wait_for_reason(self) -> None:
        """Waits for the news of a process that is gone; not for long."""
        deadline = time.monotonic() + LAST_WORDS_SECONDS
        while not self.reason and time.monotonic() < deadline:
            time.sleep(BEAT_SECONDS / 10)

    def _send(self, message: rendezvous.Message) -> None:
        for line in self._lines.values():
            line.send(message)

    def _read(self, rank: int, line: rendezvous.Line) -> None:
        while (message := line.read()) is not None:
            self._heard[rank] = time.monotonic()
            if "leave" in message:
                self._left.add(rank)
            elif "end" in message:
                self._end(printable.line(str(message["end"]), 500))
            elif "stop" in message:
                self.interrupt.request(int(message["stop"]))
            else:
                self._note(rank, message)
        if rank not in self._left:
            self._end(f"process {rank} of this cluster has gone")

    def _note(self, rank: int, message: rendezvous.Message) -> None:
        where = printable.line(str(message.get("at", "")), 100)
        at = int(message.get("done", 0)), where
        if self._at.get(rank) != at:
            self._at[rank], self._moved[rank] = at, time.monotonic()

    def _beat(self) -> None:
        main = threading.main_thread().ident or 0
        before = looked = time.monotonic()
        done, place = -1, "its beginning"
        while not self._has_ended.wait(BEAT_SECONDS):
            self._forgive(time.monotonic() - before - BEAT_SECONDS)
            report = self.work.report(is_waited_for=False)
            if report.done != done:
                done, looked = report.done, time.monotonic()
            # Seldom, since Python has crashed where a thread read the frames of one
            # that ran on; who has not moved for a while is mostly not running Python.
            pause = min(LOOK_SECONDS, self.work.stuck_timeout / LOOKS)
            if time.monotonic() - looked >= pause and not self._is_leaving:
                place, looked = _place(main), time.monotonic()
            beat = {"done": report.done, "at": place}
            self._note(self.rank, beat)
            number = self.interrupt.number
            if number is not None and not self.interrupt.is_graceful:
                process.exit_now(128 + number)  # there is nothing to save yet
            if self.rank and number is not None:
                beat["stop"] = number
            self._send(beat)
            self._check(report)
            before = time.monotonic()

    def _forgive(self, late: float) -> None:
        """Leaves out seconds for which this process, as if paused, has read nothing."""
        if late > STANDSTILL_SECONDS:
            now = time.monotonic()
            for times in (self._heard, self._moved):
                for rank, at in list(times.items()):
                    times[rank] = min(now, at + late)
            self._since = min(now, self._since + late)

    def _check(self, report: activity.Report) -> None:
        """Ends the cluster if a process is silent, or all of it gets nothing done."""
        now = time.monotonic()
        for rank in self._lines.keys() - self._left:
            if now - self._heard[rank] > self._peer_timeout:
                step, place = self._at.get(rank, (0, "its beginning"))
                self._end(
                    f"process {rank} of this cluster is silent for"
                    f" {self._peer_timeout:g} s (peer_timeout), since step {step} at"
                    f" {place}"
                )
        # Who waits for another cluster is `communication`'s concern.
        if self.rank or report.activity is activity.Activity.WAITING_FOR_ANOTHER:
            self._since = now
            return
        timeout = self.work.stuck_timeout
        if report.activity is not activity.Activity.COMPUTING:
            timeout *= 10
        since = max([self._since, *self._moved.values()])
        if now - since > timeout:
            where = "; ".join(
                f"process {rank} at {place}"
                for rank, (_, place) in sorted(self._at.items())
            )
            self._end(
                f"this cluster got nothing done for {timeout:g} s (stuck_timeout),"
                f" since step {report.done}: {where}"
            )

    def _end(self, reason: str) -> None:
        """Ends this process, and by the root all others, unless it ends by itself."""
        if self._has_ended.is_set():
            return
        self._has_ended.set()
        self.reason = reason
        self._send({"end": reason})
        for abort in self.aborts:
            with contextlib.suppress(Exception):
                abort(reason)
        time.sleep(LAST_WORDS_SECONDS)
        process.message(f"error: {reason}")
        process.exit_now(process.ENDED_BY_PEER)


def _place(thread: int) -> str:
    """Returns where a thread is in our code, such as experiments/m3/whole.py:90."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        path = pathlib.Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and ".venv" not in path.parts:
            return f"{path.relative_to(ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "its beginning"
