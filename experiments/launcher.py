"""`--cluster=all`: every cluster as a process of this machine.

The launcher binds the discriminator's socket itself and hands it down, so no port can
be lost in between. It relays what the clusters say, passes Ctrl-C on, ends the others
when one dies, and leaves nothing behind: clusters notice its own death by a pipe.
"""

import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from rich import console as rich_console
from rich import live, text

from experiments import clusters
from nebula_jax.communication import bridge
from nebula_jax.security import tls

GRACE_SECONDS = 8.0  # for the others to end by themselves once one has died
POLL_SECONDS = 0.1
WELL_ENDED = (
    0,
    clusters.STOPPED_BY_PEER,
    128 + signal.SIGINT,
    128 + signal.SIGTERM,
)


def launch(module: str, names: Sequence[str], overrides: dict[str, Any]) -> int:
    """Runs one process per cluster until all have ended.

    Args:
      module: the experiment, as in `python -m`.
      names: clusters; the first one listens.
      overrides: flags that differ from this process's, for all clusters.

    Returns:
      Exit status: 0 if all clusters ended well, 128 + n if signal n stopped them,
      else 1.
    """
    credentials = clusters.workdir() / "tls"
    if clusters.TLS.value == "auto":
        tls.issue_for_run(credentials, names)
    try:
        with bridge.listen(
            clusters.host_and_port("listen", clusters.LISTEN.value)
        ) as listening:
            return _Launch(module, names, overrides, listening).run()
    finally:
        shutil.rmtree(credentials, ignore_errors=True)


class _Launch:
    """The processes of one run."""

    def __init__(
        self,
        module: str,
        names: Sequence[str],
        overrides: dict[str, Any],
        listening: socket.socket,
    ):
        self._names = names
        self._words: queue.Queue[tuple[str, str, str]] = queue.Queue()
        self._readers: list[threading.Thread] = []
        self._signal: int | None = None
        self._lifeline, held = os.pipe()  # `held` closes with this process
        self._held = held
        host, port = listening.getsockname()[:2]
        self._processes = {}
        for name in names:
            listens = name == names[0]
            flags = overrides | {
                "cluster": name,
                "workdir": str(clusters.workdir()),
                "listen": f"{host}:{port}" if listens else "127.0.0.1:0",
                "peer": "" if listens else f"{host}:{port}",
                "tls": self._tls(name),
            }
            passed = [self._lifeline] + ([listening.fileno()] if listens else [])
            environment = os.environ | {clusters.LIFELINE_FD: str(self._lifeline)}
            if listens:
                environment[clusters.LISTEN_FD] = str(listening.fileno())
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-m", module, *clusters.flag_arguments(flags)],
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
        listening.close()  # a dead discriminator's port must refuse, not hang

    @staticmethod
    def _tls(name: str) -> str:
        if clusters.TLS.value == "off":
            return "off"
        folder = clusters.TLS.value
        if folder == "auto":
            folder = str(clusters.workdir() / "tls")
        return os.path.join(folder, tls.certificate_name(name))

    def _relay(self, name: str) -> None:
        process = self._processes[name]
        for kind, stream in (("progress", process.stdout), ("message", process.stderr)):
            reader = threading.Thread(
                target=self._read, args=(name, kind, stream), daemon=True
            )
            reader.start()
            self._readers.append(reader)

    def _read(self, name: str, kind: str, stream) -> None:
        for line in stream:
            self._words.put((name, kind, line.rstrip("\n")))

    def run(self) -> int:
        """Waits for the end; see `launch`."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        try:
            with _Screen(self._names) as screen:
                status = self._watch(screen)
                for reader in self._readers:
                    reader.join(timeout=2.0)
                self._show(screen)
            return status
        finally:
            for process in self._processes.values():
                if process.poll() is None:
                    process.kill()
                process.wait()
            os.close(self._held)
            os.close(self._lifeline)

    def _on_signal(self, number, frame) -> None:
        del frame
        if self._signal is not None:  # the second time: at once
            for process in self._processes.values():
                process.kill()
            return
        self._signal = number
        # The listening cluster agrees with the others on a last step.
        listener = self._processes[self._names[0]]
        if listener.poll() is None:
            listener.send_signal(number)

    def _watch(self, screen: "_Screen") -> int:
        died: str | None = None
        deadline = float("inf")
        while any(process.poll() is None for process in self._processes.values()):
            self._show(screen)
            for name, process in self._processes.items():
                if died is None and process.poll() not in (None, *WELL_ENDED):
                    died = name
                    deadline = time.monotonic() + GRACE_SECONDS
            if time.monotonic() > deadline:
                for process in self._processes.values():
                    process.kill()
            time.sleep(POLL_SECONDS)
        self._show(screen)
        ends = {name: process.returncode for name, process in self._processes.items()}
        if died is None:
            died = next((name for name in ends if ends[name] not in WELL_ENDED), None)
        if died is not None:
            screen.message(
                "", f"error: {died} {_ended(ends[died])}; all clusters ended"
            )
            return 1
        return 128 + self._signal if self._signal else max(ends.values())

    def _show(self, screen: "_Screen") -> None:
        while True:
            try:
                name, kind, line = self._words.get_nowait()
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


class _Screen:
    """On a terminal one line per cluster, rewritten in place; elsewhere plain lines."""

    def __init__(self, names: Sequence[str]):
        self._console = rich_console.Console(stderr=False, highlight=False)
        self._lines = {name: f"{name:<13} starting" for name in names}
        self._live = None
        if self._console.is_terminal:
            self._live = live.Live(console=self._console, refresh_per_second=4)

    def __enter__(self) -> "_Screen":
        if self._live:
            self._live.start()
            self._live.update(self._all())
        return self

    def __exit__(self, *unused) -> None:
        if self._live:
            self._live.stop()

    def _all(self) -> text.Text:
        return text.Text("\n".join(self._lines.values()), no_wrap=True)

    def progress(self, name: str, line: str) -> None:
        """A cluster's newest progress line."""
        self._lines[name] = line
        if self._live:
            self._live.update(self._all())
        else:
            print(line, flush=True)

    def message(self, name: str, line: str) -> None:
        """Something a person should read."""
        line = f"[{name}] {line}" if name else line
        if self._live:
            self._console.print(line, markup=False)
        else:
            clusters.say(line)
