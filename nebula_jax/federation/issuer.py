"""The authority as a process of its own, which no stranger talks to.

The switch of its lab starts it and passes requests on, a JSON object on a line each way
(`joining.answer`). The key of the authority is in that process alone. It may be another
user's: then the switch starts it by a command such as sudo.
"""

import asyncio
import contextlib
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
        """Starts nothing yet; `command` is its program and arguments."""
        self._command, self._turn = command, asyncio.Lock()
        self._running: asyncio.subprocess.Process | None = None
        self._is_closed = False

    async def ask(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Sends a request; returns the answer.

        Raises:
          site_folder.Refusal: if the authority refuses.
          site_folder.FederationError: if it does not run.
        """
        # Who asks may be cancelled; the answer would then be the next one's.
        answer = await asyncio.shield(self._in_turn(json_lines.encode(fields)))
        if "error" in answer:
            reason = str(answer.get("reason", "failed"))
            raise site_folder.Refusal(reason, str(answer["error"]))
        return answer

    async def _in_turn(self, line: bytes) -> Mapping[str, Any]:
        async with self._turn:
            return await self._asked(line)

    async def _asked(self, line: bytes) -> Mapping[str, Any]:
        if self._is_closed:
            raise site_folder.FederationError("the switch has ended")
        pipe = asyncio.subprocess.PIPE
        if self._running is not None and self._running.returncode is not None:
            await self._end()
        if self._running is None:
            self._running = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=pipe,
                stdout=pipe,
                limit=LONGEST,
                start_new_session=True,  # an interrupt is for the switch
            )
        running = self._running
        assert running.stdin is not None
        assert running.stdout is not None
        try:
            running.stdin.write(line)
            await running.stdin.drain()
            return json_lines.decode(await running.stdout.readline())
        except (OSError, ValueError, json_lines.Malformed):
            await self._end()
            raise site_folder.FederationError(
                "the process of the authority has ended: " + " ".join(self._command)
            ) from None

    async def close(self) -> None:
        """Ends the process, once it has answered; no other is started."""
        async with self._turn:
            self._is_closed = True
            await self._end()

    async def _end(self) -> None:
        """Ends the process: it reads the end of its requests."""
        running, self._running = self._running, None
        if running is None:
            return
        assert running.stdin is not None
        running.stdin.close()
        try:
            async with asyncio.timeout(END_SECONDS):
                await running.communicate()
        except TimeoutError:
            with contextlib.suppress(OSError):
                running.kill()
            await running.communicate()
