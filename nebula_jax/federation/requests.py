"""The requests of trainers and commands of a lab to their switch."""

import asyncio
import datetime
import re
import secrets
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from nebula_jax import errors, printable
from nebula_jax.communication import endpoints
from nebula_jax.communication.wire import json_lines
from nebula_jax.federation import inner, line, streams, upkeep
from nebula_jax.federation.state import ENTRY_BYTES, Served, State
from nebula_jax.security import accounts, names
from nebula_jax.security.audit import entries
from nebula_jax.security.membership import checkup, member
from nebula_jax.security.membership.checkup import FINE, UNCLEAR, WRONG, Check

_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NAME = re.compile(r"[0-9a-f]{16}")
_ACCOUNT = re.compile(r"[a-z][a-z0-9-]{0,31}@[a-z0-9-]{1,63}")
WAITING_SECONDS = 30.0  # after its last attempt a trainer is no longer shown
RECORDED = ("job", "checkpoint", "data", "fault")  # kinds that a trainer may log


def is_job(name: str) -> bool:
    """Returns True if a job may have this name, which audit entries have to take."""
    return bool(_JOB.fullmatch(name)) and not entries.may_be_secret(name)


def check_about(about: streams.About) -> None:
    """Raises json_lines.Malformed at a stream that another switch describes wrongly."""
    lab = about.account.partition("@")[2]
    if not (
        is_job(about.job)
        and _NAME.fullmatch(about.name)
        and _ACCOUNT.fullmatch(about.account)
        and lab == about.lab
        and names.is_cluster(about.connector)
        and names.is_cluster(about.listener)
    ):
        raise json_lines.Malformed("a stream whose names cannot be right")


async def connect(served: Served) -> streams.Trainer:
    """Connects to a trainer here; raises OSError if it does not answer."""
    reader, writer = await asyncio.open_connection(*served.address)
    endpoints.keep_alive(writer.get_extra_info("socket"))
    return reader, writer


async def serve(
    switch: State,
    kept: upkeep.Upkeep,
    account: accounts.Account,
    fields: Mapping[str, Any],
    asker: streams.Trainer,
) -> None:
    """Serves one request of a connection; raises errors.NebulaError if it is refused.

    `asker` is the connection: after `dial` a stream, and held open after `serve`.
    """
    made = _Request(switch, fields, account, asker)
    match json_lines.field(fields, "op", str):
        case "dial":
            await made.dial(kept)
        case "serve":
            await made.serve()
        case "record":
            await made.record(kept)
            made.answer(done=True)
        case "status":
            sent = {lab: each.bytes_sent for lab, each in switch.lines.items()}
            made.answer(lab=switch.lab, sent=sent, checks=status(switch, kept))
        case "dialed":
            made.answer(accounts=made.dialed())
        case "list":
            older = json_lines.field(fields, "number", int) < kept.number
            made.answer(list=kept.listed.text if older and kept.listed else "")
        case "witnesses":
            lab = json_lines.field(fields, "of", str)
            made.answer(heads=await kept.cosigning.ask(lab))
        case "certify":
            pem = await kept.certified(member.Renewal.parse(fields))
            made.answer(pem=pem.decode())
        case "authority":
            made.answer(**await switch.ask(fields))
        case "join":  # this lab anew: an invitation's secret vouches for it as well
            made.check_owner()
            made.answer(**await switch.ask(fields))
        case "rotate":
            made.check_owner()
            await kept.rotate()
            made.answer(done=True)
        case other:
            raise json_lines.Malformed(f"requested {other!r}")


class _Request(NamedTuple):
    """A request of an account of this lab."""

    switch: State
    fields: Mapping[str, Any]
    account: accounts.Account
    asker: streams.Trainer

    def answer(self, **fields: Any) -> None:
        inner.answer(self.asker[1], **fields)

    def check_owner(self) -> None:
        if not self.account.is_owner:
            raise accounts.AccountError("the owner of the lab alone does this")

    def job(self) -> str:
        """Returns its job, after a check that it is nobody else's here."""
        job = json_lines.field(self.fields, "job", str)
        if not is_job(job):
            raise json_lines.Malformed(f"{job!r} cannot be the name of a job")
        for (other, cluster), served in self.switch.served.items():
            if other == job and served.account.name != self.account.name:
                if served.is_shared and self.fields.get("to") == cluster:
                    continue
                raise inner.Refused(f"job {job} is one of {served.account.name} here")
        return job

    def cluster(self, name: str) -> str:
        cluster = json_lines.field(self.fields, name, str)
        if not names.is_cluster(cluster):
            raise json_lines.Malformed(f"{cluster!r} is no cluster's name")
        return cluster

    def dialed(self) -> list[str]:
        """Returns the accounts that have dialed a trainer here, as a lab's cluster."""
        lab = json_lines.field(self.fields, "lab", str)
        wanted = self.job(), self.cluster("to"), self.cluster("from"), lab
        return sorted(
            {
                about.account
                for about, _ in self.switch.in_flight.values()
                if (about.job, about.connector, about.listener, about.lab) == wanted
            }
        )

    async def dial(self, kept: upkeep.Upkeep) -> None:
        """Carries a stream to a trainer of whichever lab has it, to its end."""
        switch, account, job = self.switch, self.account, self.job()
        connector, listener = self.cluster("from"), self.cluster("to")
        if why := switch.refusals.get((job, connector)):
            raise inner.Refused(f"the switch of {switch.lab} ended its stream: {why}")
        switch.check_quota(account.name)
        lab = json_lines.field(self.fields, "lab", str)
        vouched = f"{account.name}@{switch.lab}"

        def about(other: str) -> streams.About:
            name = secrets.token_hex(8)
            return streams.About(name, job, vouched, connector, listener, other)

        served = switch.served.get((job, listener))
        if served is not None and lab in ("", switch.lab):
            await self._carry_here(about(switch.lab), served)
            return
        if not lab:
            switch.check_named(job, listener)
        reasons, is_asked = [], lab == switch.lab
        labs = {lab} if lab else switch.lines.keys() | switch.no_line.keys()
        for each in sorted(labs):
            if each not in switch.lines:
                if lab and each in switch.gone:
                    raise inner.Lost(switch.gone[each])
                reasons.append(
                    f"it is not at {each}, which is this lab"
                    if each == switch.lab
                    else f"no line to {each}: {_away(switch, kept, each)}"
                )
                continue
            there = about(each)
            try:
                switch.rules.check_lab(job, listener, each)
                is_asked = True
                end = await switch.open(each, there, account.limits.share)
            except errors.NebulaError as error:
                reasons.append(str(error))
                continue
            self.answer(lab=each)
            await switch.carry(there, account.name, self.asker, end, is_listener=False)
            return
        # Another lab than those that were revoked may come back.
        if not lab and switch.gone and switch.members <= switch.gone.keys():
            raise inner.Lost("; ".join(switch.gone.values()))
        if switch.is_revoked:
            raise inner.Lost("; ".join(switch.no_line.values()))
        if switch.expired:
            reasons.append(switch.expired)
        if not lab and switch.lines:
            reasons.append(
                f"this switch has lines to {', '.join(sorted(switch.lines))} alone, and"
                " none relays: another lab's needs its address as --peer, or it theirs"
            )
        why = "; ".join(reasons) or "no other lab is connected"
        what, state = f"{connector} of job {job}", UNCLEAR if is_asked else WRONG
        check = Check(what, state, f"waits for {listener}: {why}")
        self._waits((job, connector), check)
        raise inner.Absent(f"{listener} of job {job} is at no lab at present ({why})")

    def _waits(self, cluster: tuple[str, str], check: Check) -> None:
        """Notes that a cluster waits; forgets those that do so no more."""
        now, before = time.monotonic(), self.switch.waiting.items()
        fresh = {each: of for each, of in before if now < of[0] + WAITING_SECONDS}
        self.switch.waiting = {**fresh, cluster: (now, check)}

    async def _carry_here(self, about: streams.About, served: Served) -> None:
        """Carries a stream to a trainer of this lab: half of it for each of both."""
        switch, other = self.switch, served.account.name
        if why := switch.why_barred(other):
            raise inner.Refused(f"{about.listener} of job {about.job} is barred: {why}")
        switch.take_entries(about.account)
        near, far = line.local_pair()
        trainer = await connect(served)
        self.answer(lab=switch.lab)
        switch.begin(switch.carry(about, other, trainer, far, is_listener=True))
        name = self.account.name
        await switch.carry(about, name, self.asker, near, is_listener=False)

    async def serve(self) -> None:
        """Lets others reach a trainer, for as long as its connection lasts."""
        switch, key = self.switch, (self.job(), self.cluster("from"))
        reader, writer = self.asker
        peer = writer.get_extra_info("peername")  # of a Unix socket no tuple
        host = peer[0] if isinstance(peer, tuple) else "127.0.0.1"
        address = host, json_lines.field(self.fields, "port", int)
        if key in switch.served:
            raise inner.Refused(
                f"{key[1]} of job {key[0]} is here already; another run needs another"
                " job"
            )
        is_shared = self.fields.get("shared") is True  # to those with a grant alone
        lab = str(self.fields.get("lab", ""))
        if not lab and not is_shared:
            switch.check_named(key[0])
        made = Served(address, self.account, is_shared, lab, writer)
        switch.served[key] = made
        switch.refusals.pop(key, None)
        try:
            self.answer(lab=switch.lab)
            await writer.drain()
            await reader.read()  # to its end
        finally:
            if switch.served.get(key) is made:
                del switch.served[key]

    async def record(self, kept: upkeep.Upkeep) -> None:
        """Puts an entry into the audit log, on the disk; the owner may put in any."""
        kind: str = json_lines.field(self.fields, "kind", str)
        what = json_lines.field(self.fields, "what", dict)
        if kind not in RECORDED and not self.account.is_owner:
            raise json_lines.Malformed(f"{kind!r} is no entry of a trainer")
        if kind in RECORDED:
            who = f"{self.account.name}@{self.switch.lab}"
            self.switch.take_entries(who, 1 + len(str(what)) // ENTRY_BYTES)
        self.switch.record(kind, self.account.name, **what)
        await asyncio.to_thread(self.switch.audit.commit)
        if kind == "checkpoint" or kind not in RECORDED:
            kept.cosigning.send()  # peers witness what such entries stand on


def _away(switch: State, kept: upkeep.Upkeep, lab: str) -> str:
    """Returns what there may be to do about a lab without a line, in words."""
    if lab in switch.no_line:
        return switch.no_line[lab]
    since = kept.listed.revoked.get(lab) if kept.listed else None
    if since is not None:
        day = datetime.datetime.fromtimestamp(since, datetime.UTC)
        return f"it was revoked on {day:%Y-%m-%d}; has it joined again?"
    return (
        "is its switch running? one of both needs --listen, the other that address as"
        " --peer"
    )


def status(switch: State, kept: upkeep.Upkeep) -> list[Check]:
    """Returns what `nebula status` shows: lines, trainers and jobs."""
    now, streams_now = time.time(), list(switch.in_flight.values())
    text = f"runs for {switch.lab}, revocation list {kept.number}"
    found = [Check("switch", FINE, text)]
    if switch.expired:
        found.append(Check("certificates", WRONG, switch.expired))
    for lab, each in sorted(switch.lines.items()):
        text = (
            f"for {checkup.duration(now - each.since)}, {len(each.streams)} streams,"
            f" {printable.size(each.bytes_sent)} sent,"
            f" {printable.size(each.bytes_received)} received"
        )
        found.append(Check(f"line to {lab}", FINE, text))
        if abs(each.clock_ahead) > checkup.MOST_CLOCK_SECONDS:
            found.append(checkup.clocks(each.clock_ahead, f"{lab}'s"))
    without = switch.no_line | switch.gone
    for lab in without.keys() - switch.lines.keys():
        found.append(Check(f"line to {lab}", WRONG, f"none: {without[lab]}"))
    state = UNCLEAR if switch.lines else WRONG
    away = switch.members - switch.lines.keys() - without.keys()
    for lab in sorted(away) if not switch.is_revoked else ():
        text = f"none at present: {_away(switch, kept, lab)}"
        found.append(Check(f"line to {lab}", state, text))
    if len(found) == 1:
        text = "none at present: nebula invite brings another lab"
        found.append(Check("lines", UNCLEAR, text))
    for (job, cluster), served in sorted(switch.served.items()):
        users = [
            about.connector
            for about, _ in streams_now
            if (about.job, about.listener) == (job, cluster)
        ]
        state, text = FINE, "waits for others to come"
        if users:
            text = f"serves {', '.join(users)}"
        elif (lab := served.lab) not in ("", switch.lab, *switch.lines):
            text = f"waits for others of {lab}: no line to {lab}: "
            state, text = WRONG, text + _away(switch, kept, lab)
        text += f" ({served.account.name})"
        found.append(Check(f"{cluster} of job {job}", state, text))
    for about, since in streams_now:
        what = f"{about.connector} to {about.listener} of job {about.job}"
        span = checkup.duration(now - since)
        text = f"with {about.lab}, for {span} ({about.account})"
        found.append(Check(what, FINE, text))
    for _, (since, check) in sorted(switch.waiting.items()):
        if time.monotonic() < since + WAITING_SECONDS:
            found.append(check)
    for (job, cluster), why in sorted(switch.refusals.items()):
        found.append(Check(f"{cluster} of job {job}", WRONG, f"is refused: {why}"))
    for job, count in switch.used.items():
        text = f"has used {printable.size(count)} in all"
        found.append(Check(f"job {job}", FINE, text))
    return found
