"""The switch of a lab: it carries the streams of its trainers to other labs.

It alone has an outside address. Trainers connect to its inner address; other switches
connect to it, or it dials them, from behind a NAT as well. What it carries is sealed
end to end (`security.seal`): it can count, refuse, drop or delay, not change.
"""

import asyncio
import contextlib
import os
import pathlib
import secrets
import socket
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from nebula_jax import errors, printable
from nebula_jax.communication import endpoints
from nebula_jax.communication.wire import json_lines
from nebula_jax.federation import (
    inner,
    joining,
    line,
    outside,
    requests,
    state,
    streams,
    upkeep,
)
from nebula_jax.security import shared_secret
from nebula_jax.security.membership import site_folder
from nebula_jax.security.tls import between_labs

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0  # seconds between attempts to dial
MOST_UNPROVEN = 256  # connections inside that have not sent a request yet
REASON_CHARACTERS = 500  # of another switch's
REVOKED = (
    "the certificate of this lab was revoked; `nebula join` with another invitation, in"
    " the same folder, replaces it"
)


class Switch:
    """The running switch of a lab."""

    def __init__(
        self,
        folder: site_folder.Folder,
        log: Callable[[str], None] = print,
        issuer: joining.Ask | None = None,
    ) -> None:
        """Opens what the switch needs; for arguments and errors see `state.State`."""
        self.state = state.State(folder, log, issuer)
        self.upkeep = upkeep.Upkeep(self.state)
        self._entrance = outside.Entrance(self.state, self._serve_accepted)
        self.socket: pathlib.Path | None = None
        """A Unix socket to make, for other users of the host, in the same group."""
        self._inside = inner.Address("", 0, secrets.token_urlsafe(32))
        self._unproven: dict[asyncio.StreamWriter, None] = {}  # from the oldest on
        self._stop = asyncio.Event()
        self._failure: BaseException | None = None

    async def run(
        self,
        listening: socket.socket | None,
        peers: Sequence[tuple[str, tuple[str, int]]],
        inside: socket.socket,
        started: Callable[[], None] = lambda: None,
    ) -> None:
        """Runs until `stop`; raises site_folder.FederationError if a part has failed.

        `listening` is bound to the outside address, for other switches (None to dial
        alone); `peers` are labs to dial, with the addresses of their switches.
        """
        folder, begin = self.state.folder, self._begin
        host, port = inside.getsockname()[:2]
        self._inside = self._inside._replace(host=host, port=port)
        begin(self._accept_trainers(inside))
        users = inner.listen(self.socket) if self.socket is not None else None
        if users is not None:
            begin(self._accept_trainers(users))
        inner.write(folder, self._inside)
        self._record("switch", event="started")
        if listening is not None:
            begin(self._entrance.accept(listening))
        self.state.peers = [endpoints.written(address) for _, address in peers]
        for lab, address in peers:
            begin(self._keep_dialing(lab, address))
        begin(self.upkeep.run())
        started()
        try:
            await self._stop.wait()
        finally:
            inner.forget(folder)
            inside.close()
            if users is not None:
                users.close()
            for each in list(self.state.lines.values()):
                each.close("the switch was stopped")
            await self.state.end_tasks()
            self._record("switch", event="stopped")
            await self.upkeep.close()
            if listening is not None:
                listening.close()
        if self._failure is not None:
            raise site_folder.FederationError(
                f"the switch cannot go on: {self._failure!r}"
            ) from self._failure

    def stop(self) -> None:
        """Ends `run`."""
        self._stop.set()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Starts what a switch must not be without: if it fails, the switch ends.

        One that accepted connections and enforced no revocation would be worse.
        """

        def done(task: asyncio.Task[None]) -> None:
            if not task.cancelled():
                self._failure = self._failure or task.exception()
                self.stop()

        task = asyncio.create_task(work)
        self.state.hold(task)
        task.add_done_callback(done)

    def _record(self, kind: str, **what: Any) -> None:
        self.state.record(kind, self.state.lab, **what)

    # Other switches.

    async def _serve_accepted(self, connection: line.Connection) -> None:
        await self._run_line(self._line(connection, is_dialer=False))

    async def _keep_dialing(self, lab: str, address: tuple[str, int]) -> None:
        """Keeps a line to a lab at an address; a successor is there before it ends.

        While another line to the lab stands, whoever has dialed it, none is made.
        """
        pause, logged, where = 0.0, "", endpoints.written(address)
        made: line.Line | None = None
        while True:
            while (other := self._standing(lab, made)) is not None:
                await other.ended.wait()
            try:
                connection = await outside.dial(self.state.folder, lab, address)
            except (errors.NebulaError, OSError, EOFError) as error:
                why = f"{where}: {between_labs.in_words(error)}"
                if why != logged:  # the same reason again is no news
                    about = {"event": between_labs.reason_of(error)}
                    text = f"no line to {lab}: {why}; trying again"
                    self.state.note(where, text, "fault", self.state.lab, **about)
                    logged = why
                self.state.no_line[lab] = why
                pause = _longer(pause)
            else:
                began, logged = time.monotonic(), ""
                made = self._line(connection, is_dialer=True)
                running = asyncio.create_task(self._run_line(made))
                self.state.hold(running)
                renewed = asyncio.create_task(made.wants_successor.wait())
                ends = {running, renewed}
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                renewed.cancel()
                # A line that ends at once costs two log entries: dial ever less often.
                has_lasted = time.monotonic() - began > LONGEST_PAUSE
                if has_lasted or not running.done():  # its successor: dialed at once
                    pause = 0.0
                elif await self._is_revoked():
                    self.state.no_line[lab] = REVOKED
                    while await self._has_revoked_certificate():
                        await asyncio.sleep(LONGEST_PAUSE)
                    pause, self.state.is_revoked = 0.0, False
                else:
                    self.state.no_line[lab] = made.reason
                    pause = _longer(pause)
            await asyncio.sleep(pause)

    def _standing(self, lab: str, made: line.Line | None) -> line.Line | None:
        """Returns the line to a lab that stands beside one, if there is any."""
        other = self.state.lines.get(lab)
        return None if other is made or other is None or other.is_closed else other

    async def _is_revoked(self) -> bool:
        """Finds out if this lab was revoked: by the list, since no line tells it."""
        with contextlib.suppress(errors.NebulaError):
            await self.upkeep.fetch_list()
        if not await self._has_revoked_certificate():
            return False
        if not self.state.is_revoked:
            self.state.is_revoked = True
            self.state.log(REVOKED)
            self.state.lost("", REVOKED)
        return True

    async def _has_revoked_certificate(self) -> bool:
        with contextlib.suppress(errors.NebulaError):
            return await self.upkeep.is_revoked()
        return False

    def _line(self, connection: line.Connection, is_dialer: bool) -> line.Line:
        beat, receive = self.upkeep.beat, self._receive
        return line.Line(connection, is_dialer=is_dialer, beat=beat, receive=receive)

    async def _run_line(self, made: line.Line) -> None:
        lab = made.lab
        former = self._standing(lab, made)
        if former is not None and former.is_dialer != made.is_dialer:
            first = min(lab, self.state.lab)  # both labs come to the same line
            if made.is_dialer != (first == self.state.lab):
                made.close(f"{lab} and this lab dial each other: {first}'s line stays")
                self.state.log(f"closed a line to {lab}: {first}'s stays")
                return
        try:
            self.state.lines[lab] = made
            self.state.members.add(lab)
            self.state.gone.pop(lab, None)
            if former is not None:
                former.close("another line took its place")
            await self.upkeep.met(made)
            about = {"event": "opened", "lab": lab, "serial": f"{made.serial:x}"}
            self._note(lab, f"connected with {lab}", **about)
            reason = await made.run()
        except (errors.NebulaError, OSError) as error:  # what is here of the lab
            made.close(str(error))
            outside.refused(self.state, lab, error)
            return
        finally:
            if self.state.lines.get(lab) is made:
                del self.state.lines[lab]
        counts = {"sent": made.bytes_sent, "received": made.bytes_received}
        text = f"the line to {lab} ended: {reason}"
        self._note(lab, text, event="closed", lab=lab, **counts)

    def _note(self, of: str, text: str, /, **what: Any) -> None:
        """Notes a session, of which a lab can cause many."""
        self.state.note(of, text, "session", self.state.lab, **what)

    def _receive(self, made: line.Line, fields: Mapping[str, Any]) -> None:
        """Takes a control message of another switch."""
        op = json_lines.field(fields, "op", str)
        if op == "open":
            self._announced(made, fields)
        elif op in ("opened", "refused"):
            text = json_lines.field(fields, "why", str)
            why = printable.line(text, REASON_CHARACTERS)
            refusal: errors.NebulaError | None = None
            if op == "refused" and fields.get("absent") is True:
                refusal = inner.Absent(why)
            elif op == "refused":
                refusal = inner.Refused(f"the switch of {made.lab}: {why}")
            stream = made.streams.get(json_lines.field(fields, "stream", int))
            if stream is not None:  # else nothing waits for it any more
                stream.answer(refusal)
        else:
            self.upkeep.receive(made, op, fields)

    # Streams.

    def _announced(self, made: line.Line, fields: Mapping[str, Any]) -> None:
        """Takes up a stream that a trainer of another lab has dialed."""
        number = json_lines.field(fields, "stream", int)
        try:
            stream = made.accept(number)
        except line.Full as error:
            made.send(op="refused", stream=number, why=str(error), absent=True)
            return
        texts = [json_lines.field(fields, name, str) for name in streams.About._fields]
        about = streams.About._make(texts)._replace(lab=made.lab)
        self.state.begin(self._answer(made, stream, about))

    async def _answer(
        self, made: line.Line, stream: line.Stream, about: streams.About
    ) -> None:
        try:
            requests.check_about(about)
            self.state.rules.check_lab(about.job, about.connector, made.lab)
            served = self.state.served.get((about.job, about.listener))
            if served is None:
                raise inner.Absent(f"{about.listener} of job {about.job} is not here")
            if served.lab not in ("", made.lab):
                raise inner.Refused(
                    f"{about.listener} of job {about.job} is for {served.lab} alone"
                )
            if not served.lab and not served.is_shared:
                self.state.check_named(about.job, about.connector)
            if self.state.why_barred(served.account.name):
                raise inner.Refused(  # without the name, which is this lab's affair
                    f"{about.listener} of job {about.job} is barred: the quota of its"
                    " account is used up, or the account is suspended"
                )
            self.state.take_entries(about.account)
            trainer = await requests.connect(served)
        except (errors.NebulaError, OSError) as error:
            is_absent = isinstance(error, inner.Absent | OSError)
            if not is_absent:  # who is absent is asked for again and again
                text = f"refused a stream of {made.lab}: {error}"
                job = about.job if requests.is_job(about.job) else None
                what = {"reason": type(error).__name__, "job": job}
                self.state.note(made.lab, text, "refusal", made.lab, **what)
            why, number = str(error), stream.number
            made.send(op="refused", stream=number, why=why, absent=is_absent)
            stream.close(at_once=True)
            return
        made.send(op="opened", stream=stream.number, why="")
        account = served.account
        made.share(stream, account.name, account.limits.share)
        await self.state.carry(about, account.name, trainer, stream, is_listener=True)

    # Trainers and commands of this lab.

    async def _accept_trainers(self, inside: socket.socket) -> None:
        async for sock, _ in outside.accepted(inside):
            self.state.begin(self._serve_inside(sock))

    async def _serve_inside(self, sock: socket.socket) -> None:
        people, is_local = self.state.people, sock.family == socket.AF_UNIX
        if not is_local:
            endpoints.keep_alive(sock)
        reader, writer = await asyncio.open_connection(
            sock=sock, limit=inner.MOST_BYTES
        )
        try:
            self._unproven[writer] = None
            if len(self._unproven) > MOST_UNPROVEN:
                oldest = next(iter(self._unproven))
                del self._unproven[oldest]
                oldest.close()
            try:
                own = None if is_local else self._inside
                fields = await inner.read_request(reader, writer, own)
            finally:
                self._unproven.pop(writer, None)
            # Only the owner of the folder can read the token.
            uid = inner.user_of(sock) if is_local else os.geteuid()
            who = await asyncio.to_thread(people.of_user, uid)
            stream = reader, writer
            await requests.serve(self.state, self.upkeep, who, fields, stream)
        except shared_secret.Unproven:
            pass  # it has been told so
        except (errors.NebulaError, OSError, ValueError, KeyError) as error:
            kinds: dict[type, str] = {inner.Absent: "absent", inner.Lost: "lost"}
            kind = kinds.get(type(error), "error")
            reason = {kind: str(error) or repr(error)}
            with contextlib.suppress(OSError, RuntimeError):
                inner.answer(writer, **reason)
        finally:
            await streams.close(writer)


def _longer(pause: float) -> float:
    return min(max(FIRST_PAUSE, 2 * pause), LONGEST_PAUSE)
