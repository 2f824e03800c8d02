"""The authority as a process of its own, which no stranger talks to.

The switch of its lab starts it and passes requests on, a JSON object on a line each way
(`joining.answer`). The key of the authority is in that process alone. It may be another
user's: then the switch starts it by a command such as sudo.
"""

import asyncio
import concurrent.futures
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

from nebula_jax import errors
from nebula_jax.communication.wire import json_lines
from nebula_jax.federation import joining
from nebula_jax.security.membership import authority, site_folder
from nebula_jax.security.tls import between_labs

LONGEST = 2 * json_lines.MOST_BYTES
END_SECONDS = 5.0


def serve(
    issuer: authority.LocalAuthority, requests: BinaryIO, answers: BinaryIO
) -> None:
    """Answers requests until there are no more."""
    while line := requests.readline(LONGEST):
        made: Mapping[str, Any]
        try:
            made = joining.answer(json_lines.decode(line), issuer)
        except (errors.NebulaError, ValueError) as error:
            reason = between_labs.reason_of(error)
            made = {"error": str(error), "reason": reason}
        answers.write(json_lines.encode(made))
        answers.flush()


class Process:
    """The authority's process, started when it is first asked."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._running: subprocess.Popen[bytes] | None = None
        # One request at a time, whoever else waits: no other thread is taken by it.
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "authority")

    async def ask(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the authority's answer; raises Refusal or FederationError."""
        try:
            asked = self._thread.submit(self._ask, json_lines.encode(fields))
        except RuntimeError:
            raise site_folder.FederationError("the switch has ended") from None
        answer = await asyncio.wrap_future(asked)
        if "error" in answer:
            reason = str(answer.get("reason", "failed"))
            raise site_folder.Refusal(reason, str(answer["error"]))
        return answer

    def _ask(self, line: bytes) -> Mapping[str, Any]:
        if self._running is not None and self._running.poll() is not None:
            self._end()
        if self._running is None:
            self._running = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # an interrupt is for the switch
            )
        requests, answers = self._running.stdin, self._running.stdout
        assert requests is not None
        assert answers is not None
        try:
            requests.write(line)
            requests.flush()
            return json_lines.decode(answers.readline(LONGEST))
        except (OSError, json_lines.Malformed):
            self._end()
            raise site_folder.FederationError(
                "the process of the authority has ended: " + " ".join(self._command)
            ) from None

    async def close(self) -> None:
        """Ends the process, once it has answered; no other is started."""
        self._thread.submit(self._end)
        await asyncio.to_thread(self._thread.shutdown)

    def _end(self) -> None:
        """Ends the process: it reads the end of its requests."""
        running, self._running = self._running, None
        if running is None:
            return
        try:
            running.communicate(timeout=END_SECONDS)
        except (OSError, subprocess.TimeoutExpired):
            running.kill()
            running.communicate()
