"""The upkeep of a switch: certificates, revocations, quotas, and what is on disk."""

import asyncio
import contextlib
import datetime
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from nebula_jax import errors
from nebula_jax.communication.wire import json_lines
from nebula_jax.federation import cosigning, line
from nebula_jax.federation.state import State
from nebula_jax.security import policy
from nebula_jax.security.membership import checkup, member, revocation, site_folder

TURN_SECONDS = 0.2
SAVED_SECONDS = 2.0  # between looks at accounts, and their bytes on the disk
LIST_SECONDS = 0.5  # between questions for a newer revocation list
SAID_SECONDS = 3600.0  # between two lines about the same fault
RETRY_SECONDS = 30.0  # between looks if the certificates are due for renewal
LISTS = "revocation lists"  # of which the authority can make very many
EXPIRED_SECONDS = 3.0  # likewise, once they have expired: nothing crosses until then


class Upkeep:
    """The upkeep of one switch. Whatever takes the disk is done in threads."""

    def __init__(self, state: State) -> None:
        self.state = state
        self._kept = revocation.RevocationList(state.folder)
        self.number = 0  # the epoch of revocation
        self.listed: revocation.Listed | None = None  # the newest that served, if any
        self._read_list()
        self._enforced = self.number
        self.cosigning = cosigning.Cosigning(state)
        self._policy = state.folder.path / policy.FILE
        self._policy_seen = self._stamp()
        self._carried = state.counts()
        self._saved = self._listed = self._next_look = 0.0
        self._failed: dict[str, tuple[str, float]] = {}
        """What went wrong last, by what was done, and when that was said."""
        self._under_way: set[tuple[str, str]] = set()  # (lab, op) waiting for the disk

    async def run(self) -> None:
        """Does what is due, again and again; none waits for another's disk."""
        turns = (
            self._look_at_files,
            self._renew_if_due,
            self._end_expired,
            self._commit,
            self._save,
            self.cosigning.turn,
        )
        await asyncio.gather(*map(self._repeat, turns))

    async def _repeat(self, turn: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await turn()
            except (errors.NebulaError, OSError) as error:
                self._say(turn.__name__, f"error: {error}")
            await asyncio.sleep(TURN_SECONDS)

    def _say(self, what: str, text: str) -> None:
        """Logs what went wrong, the same again once an hour: it may last for days."""
        last, now = self._failed.get(what, ("", 0.0)), time.monotonic()
        if last[0] != text or now > last[1] + SAID_SECONDS:
            self._failed[what] = text, now
            self.state.log(text)

    async def met(self, made: line.Line) -> None:
        """Begins with a new line: both sides compare what they have."""
        self._enforce()  # the list may be newer than the one it was admitted by
        self._push(made)
        await self.cosigning.begin(made)

    async def close(self) -> None:
        """Writes what is not on the disk yet."""
        await self.save_counts()
        await asyncio.to_thread(self.state.audit.sign_head)
        self.state.audit.close()

    def beat(self) -> Mapping[str, Any]:
        """Returns the fields of a heartbeat: the epoch of revocation, and the time."""
        return {"revocations": self.number, "time": time.time()}

    def receive(self, made: line.Line, op: str, fields: Mapping[str, Any]) -> None:
        """Takes a control message; raises NebulaError, which ends the line."""
        match op:
            case "beat":
                theirs = json_lines.field(fields, "revocations", int)
                there = json_lines.field(fields, "time", float)
                made.clock_ahead = time.time() - there
                self.state.no_line.pop(made.lab, None)  # it has admitted this one
                if theirs < self.number:
                    self._push(made)
            case "list":
                text = json_lines.field(fields, "list", str)
                self._begin(made, op, self._take_list, made, text)
            case "renew":
                made.wants_successor.set()
            case "witnessed":
                size = json_lines.field(fields, "size", int)
                self.cosigning.has_witnessed(made, size)
            case "cosign":
                self._begin(made, op, self.cosigning.cosign_for, made, fields)
            case "cosigned":
                self._begin(made, op, self.cosigning.cosigned, made, fields)
            case "seen":
                lab = json_lines.field(fields, "of", str)
                site_folder.check_lab(lab)
                self._begin(made, op, self.cosigning.tell, made, lab)
            case "saw":
                lab = json_lines.field(fields, "of", str)
                text = json_lines.field(fields, "head", str)
                self.cosigning.told(made, lab, text)
            case _:
                raise json_lines.Malformed(f"sent a control message {op!r}")

    def _begin(
        self,
        made: line.Line,
        op: str,
        take: Callable[..., Awaitable[None]],
        *given: Any,
    ) -> None:
        """Begins to take a message, which waits for the disk.

        While one of the same kind is under way, another is dropped: a peer could send
        very many, and sends again what it needs.
        """
        key = made.lab, op

        async def work() -> None:
            try:
                await take(*given)
            except (errors.NebulaError, OSError, ValueError) as error:
                made.close(str(error))
            finally:
                self._under_way.discard(key)

        if key not in self._under_way:
            self._under_way.add(key)
            self.state.begin(work())

    # Revocation.

    async def _look_at_files(self) -> None:
        """Takes in what commands have changed: the revocation list and the policy."""
        is_due = time.monotonic() > self._listed + LIST_SECONDS
        if is_due and (self.state.is_issuer or not await self._has_list()):
            self._listed = time.monotonic()
            await self.fetch_list()
        seen = await asyncio.to_thread(self._look)
        if self.number > self._enforced:
            self._enforce()
            for each in list(self.state.lines.values()):
                self._push(each)
        if seen != self._policy_seen:
            self._policy_seen = seen
            self.state.set_rules(await asyncio.to_thread(policy.load, self._policy))
            self.state.log("policy.json was read again")

    async def fetch_list(self) -> None:
        """Gets the newest list of the authority; raises NebulaError without one."""
        known = self.number if await self._has_list() else 0
        found = await self.state.ask({"op": "list", "number": known})
        text = json_lines.field(found, "revocations", str)
        if text and await asyncio.to_thread(self._kept.accept, text):
            self.state.log("the revocation list is new")

    def _read_list(self) -> None:
        if (found := self._kept.newest()) is not None:
            self.listed = found
        self.number = found.number if found else self._kept.number

    async def _has_list(self) -> bool:
        try:
            await asyncio.to_thread(self._kept.check)
        except revocation.ListRefused:
            return False
        return True

    def _stamp(self) -> tuple[int, int]:
        """Returns what changes with the policy: an editor may write it in two parts."""
        with contextlib.suppress(OSError):
            found = self._policy.stat()
            return found.st_mtime_ns, found.st_size
        return 0, 0

    def _look(self) -> tuple[int, int]:
        self._read_list()
        return self._stamp()

    def _push(self, made: line.Line) -> None:
        if self.listed is not None:
            made.send(op="list", list=self.listed.text)

    async def _take_list(self, made: line.Line, text: str) -> None:
        if not await asyncio.to_thread(self._kept.accept, text):
            return
        await asyncio.to_thread(self._read_list)
        for each in list(self.state.lines.values()):
            if each is not made:
                self._push(each)
        self._enforce()
        text = f"revocation list {self.number} is here"
        about = {"event": "listed", "number": self.number}
        self.state.note(LISTS, text, "certificate", self.state.lab, **about)

    def _enforce(self) -> None:
        """Ends the lines to labs whose certificate was revoked."""
        self._enforced, ended = self.number, []
        for lab, each in list(self.state.lines.items()):
            if self._is_revoked(lab, each.begin):
                self.state.gone[lab] = f"the certificate of {lab} was revoked"
                each.close(self.state.gone[lab])
                self.state.lost(lab, self.state.gone[lab])
                ended.append(lab)
        for lab in ended:  # recorded last: the log may take nothing (a disk failed)
            text, about = self.state.gone[lab], {"event": "revoked", "lab": lab}
            self.state.note(LISTS, text, "certificate", self.state.lab, **about)

    def _is_revoked(self, lab: str, begin: datetime.datetime) -> bool:
        revoked = self.listed.revoked if self.listed is not None else {}
        return begin.timestamp() < revoked.get(lab, 0)

    async def is_revoked(self) -> bool:
        """Returns True if the certificate of this switch is revoked."""
        folder = self.state.folder
        own = await asyncio.to_thread(member.own_certificate, folder, "switch")
        await asyncio.to_thread(self._read_list)
        return self._is_revoked(self.state.lab, own.not_valid_before_utc)

    # Renewal.

    async def rotate(self) -> None:
        """Replaces certificate and lines now; raises NebulaError if that is refused."""
        own = self.state.folder, "switch"
        request, renewal = await asyncio.to_thread(member.renewal_request, *own)
        pem = await self.certified(renewal)
        await asyncio.to_thread(member.install, *own, request.key, pem)
        self.state.log("the certificate of this switch is new")
        self.state.record("certificate", self.state.lab, event="renewed")
        for each in list(self.state.lines.values()):
            each.renew()

    async def _renew_if_due(self) -> None:
        """Renews the switch's certificate, also one that has expired."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + RETRY_SECONDS
        folder = self.state.folder
        own = await asyncio.to_thread(member.own_certificate, folder, "switch")
        self.state.expired = ""
        if (end := own.not_valid_after_utc) <= site_folder.utc_now():
            self._next_look = now + EXPIRED_SECONDS
            text = f"the certificate of this lab expired on {end:%Y-%m-%d %H:%M} UTC"
            self.state.expired = text
        state, text = await asyncio.to_thread(checkup.issuer, folder)
        if state == checkup.WRONG:
            self._say("issuer", f"the key that issues certificates: {text}")
        if member.renewal_due(own):
            await self.rotate()

    async def _end_expired(self) -> None:
        """Ends the lines of labs whose certificate has expired, by this clock."""
        now = site_folder.utc_now()
        for lab, each in list(self.state.lines.items()):
            if each.end <= now:
                self.state.no_line[lab] = why = f"the certificate of {lab} has expired"
                each.close(why)
                self.state.lost(lab, why, may_return=True)

    async def certified(self, renewal: member.Renewal) -> bytes:
        """Gets a certificate (PEM) of the authority; raises NebulaError if refused."""
        found = await self.state.ask({"op": "renew", **renewal.fields()})
        (pem,) = json_lines.field(found, "issued", dict).values()
        return str(pem).encode("ascii", "replace")

    # Quotas and the disk.

    async def _commit(self) -> None:
        if self.state.audit.is_dirty:
            await asyncio.to_thread(self.state.audit.commit)

    async def _save(self) -> None:
        if time.monotonic() > self._saved + SAVED_SECONDS:
            self._saved = time.monotonic()
            saving = asyncio.create_task(self.save_counts())
            try:
                await asyncio.shield(saving)
            except asyncio.CancelledError:  # the switch ends, and writes what is newer
                await asyncio.wait([saving])
                raise

    async def save_counts(self) -> None:
        """Writes what of accounts and jobs has crossed; reads what accounts may now.

        A thread waits for the disk. It has copies: streams go on, and are counted.
        After errors.NebulaError or OSError the next call tries again.
        """
        listing = await asyncio.to_thread(self.state.people.listing)
        self.state.accounts = {each.name: each for each in listing}
        if (counts := self.state.counts()) != self._carried:
            await asyncio.to_thread(self.state.keep, counts)
            self._carried = counts
