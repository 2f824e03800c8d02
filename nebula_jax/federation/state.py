"""The state of a running switch, and what it does with streams."""

import asyncio
import collections
import contextlib
import itertools
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NamedTuple

from nebula_jax import errors
from nebula_jax.communication import pending_connections
from nebula_jax.federation import inner, joining, line, meter, streams
from nebula_jax.security import accounts, audit, policy, store
from nebula_jax.security.audit import entries, witness
from nebula_jax.security.audit import log as audit_log
from nebula_jax.security.membership import checkup, member, site_folder

NOTED_BURST = 20  # entries of one cause that need not wait
NOTED_SECONDS = 60.0  # between the others: 80 MB a year, which nothing prunes
ENTRIES_BURST = 1 << 16
"""Entries that streams and trainers of a lab, or of an account here, may cause and need
not wait: those of 3,000 streams."""
ENTRIES_SECONDS = 0.1  # for each of the others
ENTRY_BYTES = 400
ISSUED_BURST = 1000  # certificates of a lab, and seconds to wait for each of the others
ISSUED_SECONDS = 60.0
AWAY_SECONDS = 5.0  # between attempts to reach the authority at another lab
OPEN_SECONDS = 10.0  # for the other switch to answer
MOST_JOBS = 1000  # whose bytes are kept, and clusters why they were refused
CARRIED = ("used", "charged", "sessions")
"""What the switch keeps over its restarts: the bytes of jobs and of accounts, and the
names of sessions (a Welcome, which has them, crosses once; streams come and go)."""


class QuotaSpent(errors.NebulaError):
    """An account whose quota is used up."""


class Served(NamedTuple):
    """A trainer here that waits for others."""

    address: tuple[str, int]  # on the inner network
    account: accounts.Account
    is_shared: bool = False  # True if this lab's other accounts may dial it too
    lab: str = ""
    """The only one whose trainers may dial it; empty if the policy has them."""
    writer: asyncio.StreamWriter | None = None  # to tell it that others cannot return


class State:
    """The state of a running switch."""

    def __init__(
        self,
        folder: site_folder.Folder,
        log: Callable[[str], None] = print,
        issuer: joining.Ask | None = None,  # the authority, if it is this lab's
    ) -> None:
        """Opens what the switch needs; raises NebulaError if it does not serve."""
        self.folder, self.log = folder, log
        self.settings = folder.load()
        self.lab = self.settings.name
        self.people = accounts.Accounts(folder.path)
        self.is_issuer = not self.settings.authority  # that is this lab's
        self.peers: list[str] = []  # addresses of the switches that this one dials
        self._issuer, self._issued = issuer, dict[str, pending_connections.Allowance]()
        """Lab -> how many certificates it may still get: each is a log entry."""
        self._away: tuple[float, str] | None = None
        """Until when the authority is not asked again, and why."""
        self.lines: dict[str, line.Line] = {}
        self.served: dict[tuple[str, str], Served] = {}  # (job, cluster) -> the trainer
        self.refusals: dict[tuple[str, str], str] = {}
        """(job, cluster) -> why its stream was ended, for its next attempt."""
        self.waiting: dict[tuple[str, str], tuple[float, checkup.Check]] = {}
        """(job, cluster) -> when it last dialed who is nowhere, and who that is."""
        self.in_flight: dict[int, tuple[streams.About, float]] = {}
        """Number -> a stream, and since when; another switch may give two one name."""
        self._numbers = itertools.count()
        self._carried = store.Store(folder.carried, CARRIED)
        self._carried.create()
        before = self._carried.read()
        self.used = collections.Counter(before["used"])  # job -> bytes, frame by frame
        self.charged = collections.Counter(before["charged"])
        """Account -> bytes that have come, for its quota."""
        self.sessions: meter.Known = before["sessions"]
        self.accounts = {each.name: each for each in self.people.listing()}
        """As upkeep has read them last; those that are newer have no limits yet."""
        self.gone: dict[str, str] = {}  # lab -> why no line comes back: it was revoked
        self.no_line: dict[str, str] = {}  # lab -> why the last attempt made no line
        self.expired = ""  # what has expired, of this lab or one that tried to connect
        self.is_revoked = False  # True if this lab has to join again: no line till then
        self.rules = policy.load(folder.path / policy.FILE)
        self.audit = audit_log.Log(folder.audit, self.lab)
        """Open last: whoever has it open is the only switch of its lab."""
        self.members = _known(folder, self.is_issuer)  # other labs, as far as is known
        self._noted: dict[str, pending_connections.RejectedLog] = {}
        self._allowances: dict[str, pending_connections.Allowance] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    def counts(self) -> store.Tables:
        """Returns a copy of what the next switch begins with."""
        return {name: dict(getattr(self, name)) for name in CARRIED}

    def keep(self, counts: store.Tables) -> None:
        """Writes what `counts` has returned."""
        with self._carried.changing() as tables:
            tables |= counts

    async def ask(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Asks the authority, here or at another lab; records what is issued here.

        Raises errors.NebulaError if it cannot be reached, or refuses.
        """
        if self._issuer is None:
            return await self._ask_elsewhere(fields)
        found, issued = await self._issuer(fields), {}
        allowed = pending_connections.Allowance(ISSUED_BURST, ISSUED_SECONDS)
        for role, pem in found.get("issued", {}).items():
            allowed = self._issued.setdefault(found["lab"], allowed)
            if not allowed.take(time.monotonic()):
                raise site_folder.FederationError(
                    f"{found['lab']} got very many certificates of late; the next in"
                    f" {ISSUED_SECONDS:.0f} seconds"
                )
            logged = await asyncio.to_thread(
                joining.logged, self.audit, found["lab"], role, pem
            )
            issued[role] = (await self._issuer(logged))["pem"]
        return {**found, "issued": issued} if issued else found

    async def _ask_elsewhere(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Asks an authority that may be away for days: not all who ask wait for it."""
        if self._away is not None and time.monotonic() < self._away[0]:
            raise joining.Unreachable(self._away[1])
        try:
            found = await asyncio.to_thread(
                joining.ask, self.folder, fields, self.peers
            )
        except joining.Unreachable as error:
            self._away = time.monotonic() + AWAY_SECONDS, str(error)
            raise
        self._away = None
        return found

    def begin(self, work: Coroutine[Any, Any, Any]) -> None:
        """Starts a task of the switch; an error of it is logged."""
        self.hold(asyncio.create_task(work))

    def hold(self, task: asyncio.Task[Any]) -> None:
        """Takes a task that ends with the switch."""
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.log(f"error: {error!r}")

    async def end_tasks(self) -> None:
        """Ends all tasks."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def record(self, kind: str, who: str, /, **what: Any) -> None:
        """Puts an entry into the audit log; upkeep brings it to the disk."""
        self.audit.append(kind, who, **what)

    def note(self, cause: str, text: str, kind: str, who: str, /, **what: Any) -> None:
        """Logs a line, and records the same: a few times, then once in a while.

        `cause` is a peer, or what stands for all strangers, who can cause very many: an
        entry tells how many others it stands for.
        """
        limit = self._noted.get(cause)
        if limit is None:
            made = self.log, NOTED_BURST, NOTED_SECONDS
            limit = self._noted[cause] = pending_connections.RejectedLog(*made)
        others = limit.add(text, time.monotonic())
        if others is not None:
            self.record(kind, who, **what, **({"others": others} if others else {}))

    def _allowance(self, account: str) -> pending_connections.Allowance:
        """Returns what bounds the entries of an account; another lab's share one."""
        _, _, lab = account.partition("@")
        made = pending_connections.Allowance(ENTRIES_BURST, ENTRIES_SECONDS)
        return self._allowances.setdefault(account if lab == self.lab else lab, made)

    def take_entries(self, account: str, count: int = 1) -> None:
        """Counts entries of an account; raises inner.Absent if it has caused many."""
        allowed = self._allowance(account)
        if not allowed.take(time.monotonic()):
            raise inner.Absent(f"{account} has made very many entries in the audit log")
        allowed.spend(count - 1)

    def set_rules(self, rules: policy.Policy) -> None:
        """Takes a new policy: what the former one refused may be tried again."""
        self.rules = rules
        self.refusals.clear()

    def lost(self, lab: str, why: str, may_return: bool = False) -> None:
        """Tells the trainers that wait here that a lab, or if empty all, is lost."""
        for served in self.served.values():
            if served.writer is not None:
                about = {"gone": lab, "why": why, "may_return": may_return}
                inner.answer(served.writer, **about)

    def check_named(self, job: str, cluster: str = "") -> None:
        """Raises inner.Refused if it is open which of several labs gets a job's data.

        The job's trainer has named none. `cluster` would be at another lab; "" for any.
        """
        others = sorted(self.members | set(self.lines))
        if len(others) > 1 and not self.rules.names_lab(job, cluster):
            raise inner.Refused(
                f"{cluster or 'the others'} of job {job} could be at any of"
                f" {', '.join(others)}: give peer=NAME of the one ({self.lab} if all"
                " are here; of data, handle:HANDLE@NAME), or the labs of the job in"
                " policy.json"
            )

    def why_barred(self, account: str) -> str:
        """Returns why nothing more of an account may pass; empty if it may."""
        found = self.accounts.get(account)
        return accounts.why_barred(found, self.charged[account]) if found else ""

    def check_quota(self, account: str) -> None:
        """Raises QuotaSpent if nothing more of an account may pass."""
        if why := self.why_barred(account):
            raise QuotaSpent(why)

    async def open(self, lab: str, about: streams.About, weight: float) -> line.Stream:
        """Opens a stream to a trainer of a lab; raises inner.Absent or Refused."""
        made = self.lines[lab]
        if made.is_closed:
            raise inner.Absent(f"the line to {lab} has just ended")
        stream = made.open()
        made.send(op="open", stream=stream.number, **about._asdict())
        with contextlib.ExitStack() as undo:
            undo.callback(stream.close, at_once=True)
            try:
                async with asyncio.timeout(OPEN_SECONDS):
                    await stream.opened()
            except TimeoutError:
                raise inner.Absent(f"the switch of {lab} does not answer") from None
            except line.LineEnded as error:
                raise inner.Absent(str(error)) from None
            self.take_entries(about.account)
            undo.pop_all()
        made.share(stream, about.account.partition("@")[0], weight)
        return stream

    async def carry(
        self,
        about: streams.About,
        account: str,
        trainer: streams.Trainer,
        end: line.Stream,
        is_listener: bool,
    ) -> None:
        """Carries a stream to its end, and records what it has carried.

        That is recorded however it ends, also if it is cancelled. A stream between two
        trainers here is carried twice, and counts once: the one that dialed pays.
        `account` is this lab's, and pays; with `is_listener` the trainer here is the
        one that listens.
        """
        number = next(self._numbers)
        self.in_flight[number] = (about, time.time())
        self.waiting.pop((about.job, about.connector), None)
        job, counts = about.job, not is_listener or about.lab != self.lab
        self._begin_count(job)

        def admit(kind: str, count: int) -> None:
            """Reserves a frame of the job's; `passed` counts what has come of it."""
            self.rules.check_kind(job, kind)
            if counts:
                self.rules.check_bytes(job, self.used[job] + count)
                self.used[job] += count

        def passed(count: int) -> None:
            self.check_quota(account)  # which may be used up within a frame
            if counts:
                self.charged[account] += count

        # Each tensor asks, perhaps of a thousand channels: the same is checked once.
        checked: dict[str, Any] = {}

        def check(sides: list[meter.Channels]) -> None:
            if checked.get("by") is not self.rules or checked["sides"] is not sides:
                for kind, codec in sides[0 if is_listener else 1]:  # the trainer here
                    self.rules.check_codec(job, kind, codec)
                checked.update(by=self.rules, sides=sides)

        names = meter.Names(self.sessions, check)
        carried = streams.Carried(
            sent=meter.Meter(names, is_listener, admit, passed),
            received=meter.Meter(names, not is_listener, admit, passed),
        )
        try:
            await streams.carry(trainer, end, carried)
        finally:
            del self.in_flight[number]
            missing = carried.sent.end() + carried.received.end()
            if counts:
                self.used[job] -= missing
            ours = about.listener if is_listener else about.connector
            self._record_carried(about, account, ours, carried)

    def _begin_count(self, job: str) -> None:
        """Counts a job from what it has used; forgets another if accounts made up many.

        One that the policy names is kept: it has no second life.
        """
        self.used[job] = self.used.pop(job, 0)  # the last of all to be forgotten
        if len(self.used) > MOST_JOBS:
            kept = {about.job for about, _ in self.in_flight.values()}
            kept |= {each for each in self.used if self.rules.names_job(each)}
            self.used.pop(next((each for each in self.used if each not in kept), ""), 0)

    def _record_carried(
        self, about: streams.About, account: str, ours: str, carried: streams.Carried
    ) -> None:
        """Records what a stream of one of our clusters has carried."""
        job = entries.without_secret(about.job)  # no name keeps the counts out
        if carried.refusal is not None:
            if isinstance(carried.refusal, policy.PolicyError):
                self.refusals[about.job, ours] = str(carried.refusal)
                if len(self.refusals) > MOST_JOBS:
                    del self.refusals[next(iter(self.refusals))]
            self.log(f"ended a stream of {ours}: {carried.refusal}")
            reason, who = type(carried.refusal).__name__, about.account
            if isinstance(carried.refusal, QuotaSpent):
                who = f"{account}@{self.lab}"
            self.record("refusal", who, reason=reason, job=job)
        directions = {"sent": carried.sent.seen, "received": carried.received.seen}
        for direction, kinds in directions.items():
            self._allowance(about.account).spend(len(kinds))
            for kind, (count, nbytes) in kinds.items():
                what = {"stream": about.name, "job": job, "peer": about.lab}
                what |= {"direction": direction, "kind": entries.without_secret(kind)}
                self.record("stream", about.account, frames=count, bytes=nbytes, **what)


def _known(folder: site_folder.Folder, is_issuer: bool) -> set[str]:
    """Returns the labs whose logs this one has witnessed, and the authority's."""
    seen = audit.paths(folder.audit).peers.glob(f"*{witness.SUFFIX}")
    known = {each.stem for each in seen}
    if not is_issuer:  # before they met, a third lab may answer at its address
        known.add(member.issuing_lab(member.pinned_authority(folder)))
    return known
