"""The two processes of one transport, from the benchmark's side."""

import contextlib
import json
import pathlib
import select
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from nebula_jax import errors
from scripts.bench import transports

ROOT = pathlib.Path(__file__).parents[3]
WAN_NETNS = str(ROOT / "scripts" / "wan_netns.sh")
OWNERS = {"listen": "discriminator", "connect": "generator:0"}  # of credentials
POLL_SECONDS = 0.1
ANSWER_SECONDS = 300.0  # for one measurement, on a busy machine
END_SECONDS = 10.0
LONGEST_ANSWER = 1 << 20  # bytes


class Pair:
    """The two processes of one transport."""

    def __init__(
        self,
        name: str,
        sizes: Sequence[int],
        folder: pathlib.Path,
        *,
        line: str = "",
        netns: str = "",
    ):
        """Starts them; `met` waits until they have found each other.

        Args:
          name: in `transports.TRANSPORTS`.
          sizes: bytes, of all messages there will be.
          folder: with credentials of both; gets a socket for each.
          line: to be emulated, as in `wan.from_string`.
          netns: rate of a line that the kernel shapes, or empty.
        """
        self.name = name
        self._listening: dict[str, socket.socket] = {}
        self._ends: dict[socket.socket, str] = {}
        port = _free_port()
        commands = []
        for side, owner in OWNERS.items():
            control = folder / f"{name}.{side}"
            self._listening[side] = socket.socket(socket.AF_UNIX)
            self._listening[side].bind(str(control))
            self._listening[side].listen()
            credentials = str(folder / owner.replace(":", "-"))
            request = {
                "control": str(control),
                "transport": name,
                "side": side,
                "port": port,
                "sizes": list(sizes),
                "credentials": credentials if transports.TRANSPORTS[name].tls else "",
                "line": line,
            }
            module = [sys.executable, "-m", "scripts.bench.transports.worker"]
            commands.append([*module, json.dumps(request)])
        if netns:
            commands = [[WAN_NETNS, netns, "--", *commands[0], "--", *commands[1]]]
        self._processes = [
            subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL)
            for command in commands
        ]

    def met(self) -> None:
        """Waits until both ends are connected.

        Raises:
          errors.NebulaError: if they do not meet.
        """
        for side, listening in self._listening.items():
            while not select.select([listening], [], [], POLL_SECONDS)[0]:
                if any(process.poll() is not None for process in self._processes):
                    raise errors.NebulaError(f"{self.name}: a process did not start")
            self._ends[listening.accept()[0]] = side
        self._answers()

    def measure(self, what: str, **arguments: Any) -> dict[str, dict[str, Any]]:
        """Requests one of `worker.MEASUREMENTS` from both ends.

        Returns:
          side -> its answer: `connect` sends, `listen` receives.

        Raises:
          errors.NebulaError: if the transport fails.
        """
        self._request({"do": what, **arguments})
        return self._answers()

    def _request(self, request: dict[str, Any]) -> None:
        for end in self._ends:
            with contextlib.suppress(OSError):  # the reason is read, not written
                end.sendall(json.dumps(request).encode() + b"\n")

    def _answers(self) -> dict[str, dict[str, Any]]:
        """Receives an answer of each end; an error ends the wait for the other."""
        answers: dict[str, dict[str, Any]] = {}
        while waiting := [
            end for end, side in self._ends.items() if side not in answers
        ]:
            ready, _, _ = select.select(waiting, [], [], ANSWER_SECONDS)
            if not ready:
                raise errors.NebulaError(f"{self.name}: hangs")
            for end in ready:
                line = end.recv(LONGEST_ANSWER)  # whole: a small one, sent at once
                answer = json.loads(line) if line else {"error": "a process died"}
                if "error" in answer:
                    raise errors.NebulaError(f"{self.name}: {answer['error']}")
                answers[self._ends[end]] = answer
        return answers

    def close(self, at_once: bool = False) -> None:
        """Ends both processes: by a request, then by force."""
        self._request({"do": ""})
        deadline = time.monotonic() + (0 if at_once else END_SECONDS)
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        for each in (*self._ends, *self._listening.values()):
            each.close()
        for process in self._processes:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]
