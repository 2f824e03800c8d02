"""`--cluster=all`: every cluster as a process of this machine.

The launcher binds the listener's socket itself and hands it down, so no port can be
lost in between. It relays what the clusters print, passes Ctrl-C on, ends the others
when one dies, and leaves nothing behind: clusters notice its own death by a pipe.
"""

import contextlib
import dataclasses
import os
import pathlib
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import IO, NamedTuple

from nebula_jax.communication import bridge, listener
from nebula_jax.runtime import connect, process
from nebula_jax.runtime import screen as screen_lib
from nebula_jax.security import certificates, credentials, names, tls

GRACE_SECONDS = 8.0  # for the others to end by themselves once one has failed
KILLED_GRACE_SECONDS = 1.0  # once one was killed: they would wait for it to come back
POLL_SECONDS = 0.1
WELL_ENDED = (
    0,
    process.STOPPED_BY_PEER,
    128 + signal.SIGINT,
    128 + signal.SIGTERM,
)


Arguments = Callable[[str, connect.Settings], Sequence[str]]
"""(cluster, how it reaches the others) -> flags of its process."""


@contextlib.contextmanager
def prepared(
    clusters: Sequence[str], settings: connect.Settings
) -> Iterator[Callable[[str, Arguments], int]]:
    """Binds the port and finds the credentials, so that what is wrong shows at once.

    Args:
      clusters: their names; the first one listens.
      settings: `listen` and `tls` count; with `auto`, certificates are made for the
        run. Their keys are in memory alone and end with the last process of the run,
        however it ends.

    Yields:
      A function of (experiment as in `python -m`, each cluster's arguments) that runs
      one process for each cluster until all have ended. It returns their status: 0 if
      all ended well, 128 + n if signal n stopped them, else 1.
    """
    address = connect.host_and_port("listen", settings.listen)
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(listener.listen(address))
        own = _credentials(clusters, settings.tls, stack)
        where = bridge.written(listening.getsockname()[:2])
        connect.report_plain(settings)

        def launch(module: str, arguments: Arguments) -> int:
            commands = {}
            for number, name in enumerate(clusters):
                reach = dataclasses.replace(
                    settings,
                    listen="127.0.0.1:0" if number else where,
                    peer=where if number else "",
                    tls=own[name].where,
                )
                command = [sys.executable, "-m", module, *arguments(name, reach)]
                commands[name] = _Command(command, own[name].descriptors)
            return _Launch(commands, listening).run()

        yield launch


class _Own(NamedTuple):
    """The credentials of one cluster, as its process gets them."""

    where: str
    """The value of --tls."""
    descriptors: Sequence[int] = ()
    """The files in memory that it is handed."""


class _Command(NamedTuple):
    """The command of one cluster."""

    arguments: Sequence[str]
    descriptors: Sequence[int]
    """The files that it is handed."""


def _credentials(
    clusters: Sequence[str], given: str, stack: contextlib.ExitStack
) -> dict[str, _Own]:
    """Finds or makes the clusters' credentials; `stack` closes what is made."""
    if given == connect.TLS_OFF:
        return dict.fromkeys(clusters, _Own(connect.TLS_OFF))
    if given != connect.TLS_AUTO:
        folders = {name: pathlib.Path(given) / names.label(name) for name in clusters}
        for name, folder in folders.items():
            tls.client_contexts(folder, name)
        return {name: _Own(str(folder)) for name, folder in folders.items()}
    made = {}
    for name, issued in certificates.issue_all(clusters).items():
        descriptors = [credentials.in_memory(each) for each in issued]
        for each in descriptors:
            stack.callback(os.close, each)
        made[name] = _Own("fd:" + ",".join(map(str, descriptors)), descriptors)
    return made


class _Launch:
    """The processes of one run."""

    def __init__(self, commands: dict[str, _Command], listening: socket.socket) -> None:
        """Starts the commands; the first is given the socket."""
        self._names = list(commands)
        self._lines: queue.Queue[tuple[str, str, str]] = queue.Queue()
        self._readers: list[threading.Thread] = []
        self._signal: int | None = None
        self._killed: set[str] = set()
        self._lifeline, self._held = os.pipe()  # the latter closes with this process
        self._processes = {}
        for name, command in commands.items():
            passed = [self._lifeline, *command.descriptors]
            environment = os.environ | {process.LIFELINE_FD: str(self._lifeline)}
            if name == self._names[0]:
                passed.append(listening.fileno())
                environment[connect.LISTEN_FD] = str(listening.fileno())
            self._processes[name] = subprocess.Popen(
                command.arguments,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env=environment,
                pass_fds=passed,
                start_new_session=True,  # Ctrl-C reaches them through us alone
            )
            self._relay(name)
        listening.close()  # a dead listener's port must refuse, not hang

    def _relay(self, name: str) -> None:
        started = self._processes[name]
        for kind, stream in (("progress", started.stdout), ("message", started.stderr)):
            reader = threading.Thread(
                target=self._read, args=(name, kind, stream), daemon=True
            )
            reader.start()
            self._readers.append(reader)

    def _read(self, name: str, kind: str, stream: IO[str]) -> None:
        for line in stream:
            self._lines.put((name, kind, line.rstrip("\n")))

    def run(self) -> int:
        """Waits for all of them; returns the status (see `prepared`)."""
        before = {
            number: signal.signal(number, self._on_signal)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            with screen_lib.Screen(self._names) as screen:
                status = self._watch(screen)
                for reader in self._readers:
                    reader.join(timeout=2.0)
                self._show(screen)
            return status
        finally:
            for each in self._processes.values():
                if each.poll() is None:
                    each.kill()
                each.wait()
            os.close(self._held)
            os.close(self._lifeline)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self._signal is not None:  # the second time: at once
            self._kill()
            return
        self._signal = number
        # The listening cluster agrees with the others on a last step. SIGTERM, because
        # a Python that is still starting answers SIGINT with a traceback.
        listener = self._processes[self._names[0]]
        if listener.poll() is None:
            listener.terminate()

    def _kill(self) -> None:
        for name, each in self._processes.items():
            if each.poll() is None:
                each.kill()
                self._killed.add(name)

    def _watch(self, screen: screen_lib.Screen) -> int:
        deadline = float("inf")
        while any(each.poll() is None for each in self._processes.values()):
            self._show(screen)
            for status in [each.poll() for each in self._processes.values()]:
                if status not in (None, *WELL_ENDED):
                    grace = GRACE_SECONDS if status > 0 else KILLED_GRACE_SECONDS
                    deadline = min(deadline, time.monotonic() + grace)
            if time.monotonic() > deadline:
                self._kill()
            time.sleep(POLL_SECONDS)
        self._show(screen)
        ends = {name: each.returncode for name, each in self._processes.items()}
        bad = [name for name in ends if ends[name] not in WELL_ENDED]
        if self._signal is not None and not self._failed(ends):
            return 128 + self._signal
        if bad:
            # Who ended because a peer did, or was ended by us, is not to blame.
            blame = [
                name
                for name in bad
                if ends[name] != process.ENDED_BY_PEER and name not in self._killed
            ]
            died = (blame or bad)[0]
            how = _ended(ends[died])
            screen.message("", f"error: {died} {how}; all clusters ended")
            return 1
        return max(ends.values())

    def _failed(self, ends: dict[str, int]) -> bool:
        """Returns True if a cluster that was to stop failed, as on a full disk."""
        return any(status in (1, 2) for status in ends.values())

    def _show(self, screen: screen_lib.Screen) -> None:
        while True:
            try:
                name, kind, line = self._lines.get_nowait()
            except queue.Empty:
                return
            if kind == "progress":
                screen.progress(name, line)
            else:
                screen.message(name, line)


def _ended(status: int) -> str:
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"
