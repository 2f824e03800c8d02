"""The processes of the clusters of a run on this machine: started, watched, ended.

What they print is relayed, and Ctrl-C passed on. The others are ended when one dies,
and nothing is left behind: clusters notice the launcher's own death by a pipe.

If it may be, all of them are started again when one has died, as the same command would
do: a cluster that lost its memory cannot resume its sessions, and all of them have the
newest common checkpoint on disk.
"""

import contextlib
import os
import pathlib
import queue
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import IO, NamedTuple

from nebula_jax import printable
from nebula_jax.runtime import connect
from nebula_jax.runtime.life import process
from nebula_jax.runtime.life import restarts as restarts_lib
from nebula_jax.runtime.life import screen as screen_lib
from nebula_jax.runtime.records import checkpoints
from nebula_jax.training import checkpoint_files

GRACE_SECONDS = 8.0  # for the others to end by themselves once one has failed
KILLED_GRACE_SECONDS = 1.0  # once one was killed: they would wait for it to come back
POLL_SECONDS = 0.1
GPU_SHARE = 0.9  # of a GPU's memory, for all processes together
REFUSED = 2  # settings that cannot work, of a cluster: see `process`
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Command(NamedTuple):
    """The command of one cluster."""

    arguments: Sequence[str]
    descriptors: Sequence[int]  # the files that it is handed


class Processes:
    """The processes of one run."""

    def __init__(
        self,
        workdir: pathlib.Path,
        commands: dict[str, Command],
        listening: Mapping[str, socket.socket],
        restarts: int,
    ) -> None:
        """Starts nothing yet; the first command is the one to get requests to stop."""
        self._workdir, self._commands, self._listening = workdir, commands, listening
        self._names = list(commands)
        self._most_restarts, self._restarts = restarts, 0
        self._lines: queue.Queue[tuple[str, str, str]] = queue.Queue()
        self._readers: list[threading.Thread] = []
        self._signal: int | None = None
        self._since = 0.0  # of the clock, when it came
        self._killed: set[str] = set()
        self._processes: dict[str, subprocess.Popen[str]] = {}

    def run(self) -> int:
        """Runs the processes until all have ended; see `launcher.prepared`."""
        before = {
            number: signal.signal(number, self._on_signal)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        lifeline, held = os.pipe()  # the latter closes with this process
        try:
            with screen_lib.Screen(self._names) as screen:
                while True:
                    self._start(lifeline)
                    ends = self._watch(screen)
                    if not self._is_restarting(ends):
                        break
                    self._note_restart(ends, screen)
                return self._status(ends, screen)
        finally:
            for each in self._processes.values():
                if each.poll() is None:
                    each.kill()
                each.wait()
            os.close(held)
            os.close(lifeline)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _start(self, lifeline: int) -> None:
        # Of a GPU's memory each process takes three quarters, unless it is told less.
        share = f"{GPU_SHARE / len(self._commands):.3f}"
        environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": share} | os.environ
        environment |= {process.LIFELINE_FD: str(lifeline)}
        if self._most_restarts:  # else what comes after a restart compiles for long
            environment = {
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            } | environment
        self._killed.clear()
        for name, command in self._commands.items():
            passed, own = [lifeline, *command.descriptors], {}
            if name in self._listening:
                number = self._listening[name].fileno()
                passed.append(number)
                own = {connect.LISTEN_FD: str(number)}
            self._processes[name] = subprocess.Popen(
                command.arguments,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env=environment | own,
                pass_fds=passed,
                start_new_session=True,  # Ctrl-C reaches them through us alone
            )
            self._relay(name)
        if self._restarts == self._most_restarts:
            for each in self._listening.values():
                each.close()  # a dead listener's port must refuse, not hang
        if self._signal is not None:  # it came between two starts
            self._stop()

    def _relay(self, name: str) -> None:
        started = self._processes[name]
        for kind, stream in (("output", started.stdout), ("message", started.stderr)):
            reader = threading.Thread(
                target=self._read, args=(name, kind, stream), daemon=True
            )
            reader.start()
            self._readers.append(reader)

    def _read(self, name: str, kind: str, stream: IO[str]) -> None:
        for line in stream:
            is_progress = line.startswith(process.PROGRESS_MARK)
            line = line.removeprefix(process.PROGRESS_MARK)
            shown = printable.line(line.rstrip("\n"), printable.LINE_LIMIT)
            self._lines.put((name, "progress" if is_progress else kind, shown))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self._signal is not None:  # the second time: at once
            if time.monotonic() > self._since + process.TWICE_SECONDS:
                self._kill()
            return
        self._signal, self._since = number, time.monotonic()
        self._stop()

    def _stop(self) -> None:
        # The first cluster agrees with the others on a last step. SIGTERM, because a
        # Python that is still starting answers SIGINT with a traceback.
        first = self._processes.get(self._names[0])
        if first is not None and first.poll() is None:
            first.terminate()

    def _kill(self) -> None:
        for name, each in self._processes.items():
            if each.poll() is None:
                each.kill()
                self._killed.add(name)

    def _watch(self, screen: screen_lib.Screen) -> dict[str, int]:
        """Waits until all clusters have ended, and ends them if one fails.

        Returns cluster -> its status, -n if signal n killed it; the first to end is
        first.
        """
        deadline = float("inf")
        ends: dict[str, int] = {}
        while len(ends) < len(self._processes):
            self._show(screen)
            for name, each in self._processes.items():
                if name not in ends and (status := each.poll()) is not None:
                    ends[name] = status
                    grace = self._grace(name, status)
                    deadline = min(deadline, time.monotonic() + grace)
            if time.monotonic() > deadline:
                self._kill()
            time.sleep(POLL_SECONDS)
        for reader in self._readers:
            reader.join(timeout=2.0)
        self._readers.clear()
        self._show(screen)
        return ends

    def _grace(self, name: str, status: int) -> float:
        """Returns the seconds that the others have to end, once one has ended."""
        if status in process.SAVED:
            return float("inf")
        if status > 0:
            return GRACE_SECONDS
        # Nothing that they could still save would be of use to the one that died.
        if self._restarts < self._most_restarts:
            return 0.0
        # The others of its cluster notice, and tell all clusters why they end.
        return GRACE_SECONDS if "/" in name else KILLED_GRACE_SECONDS

    def _has_died(self, ends: dict[str, int]) -> bool:
        own = [status for name, status in ends.items() if name not in self._killed]
        return must_restart(own)

    def _is_restarting(self, ends: dict[str, int]) -> bool:
        return (
            self._signal is None
            and self._restarts < self._most_restarts
            and self._has_died(ends)
        )

    def _goes_on(self, ends: dict[str, int]) -> bool:
        """Returns True if the run could go on: all clusters have saved a step."""
        clusters = [name for name in ends if "/" not in name]
        folders = [checkpoints.folder_of(self._workdir, name) for name in clusters]
        with contextlib.suppress(checkpoint_files.CheckpointError):  # one has none
            return self._has_died(ends) and all(
                map(checkpoint_files.newest_about, folders)
            )
        return False

    def _note_restart(self, ends: dict[str, int], screen: screen_lib.Screen) -> None:
        died = self._to_blame(ends)
        self._restarts += 1
        how = _ended(ends[died])
        restarts_lib.record_death(self._workdir, died, how, time.time())
        screen.message(
            "",
            f"{died} {how}; all clusters start again from what they have saved (restart"
            f" {self._restarts} of {self._most_restarts})",
        )

    def _to_blame(self, ends: dict[str, int]) -> str:
        """Returns the cluster because of which a run failed: the first of them."""
        bad = [name for name in ends if ends[name] not in process.SAVED]
        # Who ended because a peer did, or was ended by us, is not to blame.
        blame = [
            name
            for name in bad
            if ends[name] != process.ENDED_BY_PEER and name not in self._killed
        ]
        return (blame or bad)[0]

    def _status(self, ends: dict[str, int], screen: screen_lib.Screen) -> int:
        if self._signal is not None and not self._failed(ends):
            return 128 + self._signal
        if all(status in process.SAVED for status in ends.values()):
            return max(ends.values())
        died = self._to_blame(ends)
        text = f"error: {died} {_ended(ends[died])}; all clusters ended"
        if self._restarts:
            text += f", after {self._restarts} of restart={self._most_restarts}"
        if self._goes_on(ends):
            text += "; the same command goes on from the last checkpoint"
        screen.message("", text)
        return REFUSED if ends[died] == REFUSED else 1

    def _failed(self, ends: dict[str, int]) -> bool:
        """Returns True if a cluster told to stop failed, or another one killed it."""
        return any(
            status in (1, REFUSED) or (_was_killed(status) and name not in self._killed)
            for name, status in ends.items()
        )

    def _show(self, screen: screen_lib.Screen) -> None:
        while True:
            try:
                name, kind, line = self._lines.get_nowait()
            except queue.Empty:
                screen.tick()
                return
            if kind == "progress":
                screen.progress(name, line)
            elif kind == "output":
                screen.output(line)
            else:
                screen.message(name, line)


def must_restart(statuses: Sequence[int]) -> bool:
    """Returns True if a run is worth starting again: it died, and nobody refused.

    `statuses` are those of clusters that the launcher did not end; -n is of signal n.
    """
    died = [
        status == process.ENDED_BY_PEER or _was_killed(status) for status in statuses
    ]
    # 1 and 2 come again (who lacked memory would lack it again, in a line's thread as
    # elsewhere), and who was stopped shall not start.
    others = {
        status
        for status, has_died in zip(statuses, died, strict=True)
        if status and not has_died
    }
    return any(died) and not others


def _was_killed(status: int) -> bool:
    """Returns True if a process died by a signal that does not request its end."""
    return status < 0 and -status not in STOP_SIGNALS


def _ended(status: int) -> str:
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"
