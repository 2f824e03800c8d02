"""`--cluster=all`: every cluster as a process of this machine.

The launcher binds the discriminator's socket itself and hands it down, so no port can
be lost in between. It relays what the clusters say, passes Ctrl-C on, ends the others
when one dies, and leaves nothing behind: clusters notice its own death by a pipe.
"""

import contextlib
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich import console as rich_console
from rich import live, text

from experiments import lifecycle, shared_flags
from nebula_jax.communication import bridge
from nebula_jax.security import certificates, tls

GRACE_SECONDS = 8.0  # for the others to end by themselves once one has failed
KILLED_GRACE_SECONDS = 1.0  # once one was killed: they would wait for it to come back
POLL_SECONDS = 0.1
WELL_ENDED = (
    0,
    lifecycle.STOPPED_BY_PEER,
    128 + signal.SIGINT,
    128 + signal.SIGTERM,
)


@contextlib.contextmanager
def prepared(names: Sequence[str]) -> Iterator[Callable[..., int]]:
    """Binds the port and finds the credentials, so that what is wrong shows at once.

    Args:
      names: clusters; the first one listens.

    Yields:
      A function of (experiment as in `python -m`, flags that differ from this
      process's, and if need be cluster -> flags that only it is given) that runs one
      process per cluster until all have ended. It returns their status: 0 if all ended
      well, 128 + n if signal n stopped them, else 1.
    """
    address = shared_flags.host_and_port("listen", shared_flags.LISTEN.value)
    made = shared_flags.TLS.value == "auto"
    if made:
        shutil.rmtree(shared_flags.workdir() / "tls", ignore_errors=True)
        certificates.issue_for_run(shared_flags.workdir() / "tls", names)
    elif shared_flags.TLS.value != "off":
        for name in names:
            tls.client_contexts(shared_flags.tls_folder(name))
    try:
        with bridge.listen(address) as listening:
            yield lambda module, overrides, own=None: _Launch(
                module, names, overrides, own or {}, listening
            ).run()
    finally:
        if made:
            shutil.rmtree(shared_flags.workdir() / "tls", ignore_errors=True)


class _Launch:
    """The processes of one run."""

    def __init__(
        self,
        module: str,
        names: Sequence[str],
        overrides: dict[str, Any],
        own: dict[str, dict[str, Any]],
        listening: socket.socket,
    ):
        self._names = names
        self._words: queue.Queue[tuple[str, str, str]] = queue.Queue()
        self._readers: list[threading.Thread] = []
        self._signal: int | None = None
        self._killed: set[str] = set()
        self._lifeline, held = os.pipe()  # `held` closes with this process
        self._held = held
        host, port = listening.getsockname()[:2]
        self._processes = {}
        for name in names:
            listens = name == names[0]
            flags = (
                overrides
                | own.get(name, {})
                | {
                    "cluster": name,
                    "workdir": str(shared_flags.workdir()),
                    "listen": f"{host}:{port}" if listens else "127.0.0.1:0",
                    "peer": "" if listens else f"{host}:{port}",
                    "tls": "off"
                    if shared_flags.TLS.value == "off"
                    else str(shared_flags.tls_folder(name)),
                }
            )
            passed = [self._lifeline] + ([listening.fileno()] if listens else [])
            environment = os.environ | {lifecycle.LIFELINE_FD: str(self._lifeline)}
            if listens:
                environment[shared_flags.LISTEN_FD] = str(listening.fileno())
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-m", module, *shared_flags.flag_arguments(flags)],
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
        before = {
            number: signal.signal(number, self._on_signal)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
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
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number, frame) -> None:
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
        for name, process in self._processes.items():
            if process.poll() is None:
                process.kill()
                self._killed.add(name)

    def _watch(self, screen: "_Screen") -> int:
        deadline = float("inf")
        while any(process.poll() is None for process in self._processes.values()):
            self._show(screen)
            for status in [process.poll() for process in self._processes.values()]:
                if status not in (None, *WELL_ENDED):
                    grace = GRACE_SECONDS if status > 0 else KILLED_GRACE_SECONDS
                    deadline = min(deadline, time.monotonic() + grace)
            if time.monotonic() > deadline:
                self._kill()
            time.sleep(POLL_SECONDS)
        self._show(screen)
        ends = {name: process.returncode for name, process in self._processes.items()}
        bad = [name for name in ends if ends[name] not in WELL_ENDED]
        if self._signal is not None and not self._failed(ends):
            return 128 + self._signal
        if bad:
            # Who ended because a peer did, or was ended by us, is not to blame.
            blame = [
                name
                for name in bad
                if ends[name] != lifecycle.ENDED_BY_PEER and name not in self._killed
            ]
            died = (blame or bad)[0]
            how = _ended(ends[died])
            screen.message("", f"error: {died} {how}; all clusters ended")
            return 1
        return max(ends.values())

    def _failed(self, ends: dict[str, int]) -> bool:
        """Whether a cluster that was asked to stop failed, as on a full disk."""
        return any(status in (1, 2) for status in ends.values())

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
            lifecycle.say(line)
