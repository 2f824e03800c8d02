"""The authority's lab is away for days: runs of others go on, and nobody mends a thing.

Clocks of labs are moved; that of OpenSSL is this machine's, so a federation is founded
in the past: what it says of a certificate is true at the end of the absence.
"""

import asyncio
import contextlib
import datetime
import time

import pytest
import two_labs
from lab_exchange import exchange_between
from lab_folders import at
from two_labs import wait_until

from nebula_jax.federation import inner, joining, outside, requests, state, upkeep
from nebula_jax.security.membership import (
    authority,
    checkup,
    member,
    revocation,
    site_folder,
)

HOUR = datetime.timedelta(hours=1)


class Clock:
    """The clock of all labs."""

    def __init__(self, monkeypatch):
        self._now, self.offset = site_folder.utc_now, datetime.timedelta()
        monkeypatch.setattr(site_folder, "utc_now", lambda: self._now() + self.offset)

    def before_the_end(self, hours):
        self.offset = -hours * HOUR


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(upkeep, "RETRY_SECONDS", 0.5)
    monkeypatch.setattr(state, "AWAY_SECONDS", 0.5)
    return Clock(monkeypatch)


@contextlib.contextmanager
def federation(path):
    """Yields the folder of lab-s and its switch, those of lab-t and lab-u, all of which
    are connected, and lab-v's, which was revoked after it had joined."""
    first = two_labs.found(path / "s")
    with contextlib.ExitStack() as stack:
        s = two_labs.Running(first, listens=True)
        stack.callback(s.stop)
        t = two_labs.Running(
            two_labs.join(path / "t", first, s.address), True, [s.peer]
        )
        stack.callback(t.stop)
        folder = two_labs.join(path / "u", first, s.address, "lab-u")
        u = two_labs.Running(folder, peers=[s.peer, t.peer])
        stack.callback(u.stop)
        revoked = two_labs.join(path / "v", first, s.address, "lab-v")
        issuer = authority.LocalAuthority(first)
        issuer.revoke("lab-v")
        listed = revocation.RevocationList(first)
        listed.accept(issuer.revocation_list()[1])
        for one, other in ((s, "lab-t"), (s, "lab-u"), (t, "lab-u")):
            one.wait_for_line(other)
        for each in (t, u):
            wait_until(lambda each=each: each.switch.upkeep.number > 1)
        yield s, t, u, revoked


def is_refused(folder, lab):
    """Checks that a lab that was revoked does not get through to another."""
    with pytest.raises((EOFError, OSError)):
        asyncio.run(asyncio.wait_for(dialed(folder, lab.peer), 20))
    wait_until(
        lambda: any("refused" in each and "revoked" in each for each in lab.lines)
    )


def test_runs_go_on_while_the_authority_is_away_for_three_days(clock, tmp_path):
    clock.before_the_end(hours=73)
    with federation(tmp_path) as (s, t, u, revoked):
        s.stop()

        def gate(step):
            hours = {5: 49, 10: 1}.get(step)  # a day later, and three days
            if hours is not None:
                clock.before_the_end(hours)
                time.sleep(3 * upkeep.TURN_SECONDS)  # each switch looks at its lines

        exchange_between(t, u, 15, gate=gate)
        assert set(t.switch.state.lines) == {"lab-u"}
        # Whoever starts on the third day does, by certificates of the first.
        clock.before_the_end(hours=0)
        u.stop()
        u.__init__(u.folder, peers=[t.peer])
        u.wait_for_line("lab-t")
        exchange_between(t, u)
        exchange_between(u, t)
        is_refused(revoked, t)
        said = [each for each in t.lines if "error: " in each]
        assert len(said) <= 2, said  # of an authority that is away: once

        s.__init__(s.folder, listens=True, port=s.address[1])
        for each in (t, u):  # they renew by themselves
            wait_until(lambda each=each: renewed(each), 60)


def test_the_host_of_the_authority_may_be_off_for_three_days(clock, tmp_path):
    """The switch of its lab, which asks it by a command, runs on as all others do."""
    clock.before_the_end(hours=73)
    first = two_labs.found(tmp_path / "s")
    answer, is_off = two_labs.issuer_in_this_process(first), False

    async def ask(fields):
        if is_off:
            raise site_folder.FederationError("the process of the authority has ended")
        return await answer(fields)

    with contextlib.ExitStack() as stack:
        s = two_labs.Running(first, listens=True, issuer=ask)
        stack.callback(s.stop)
        t = two_labs.Running(
            two_labs.join(tmp_path / "t", first, s.address), peers=[s.peer]
        )
        stack.callback(t.stop)
        is_off = True
        clock.before_the_end(hours=0)
        time.sleep(3 * upkeep.TURN_SECONDS)  # each switch looks at its lines
        exchange_between(s, t)
        t.stop()
        t.__init__(t.folder, peers=[s.peer])
        t.wait_for_line("lab-s")
        exchange_between(s, t)
        is_off = False
        for each in (s, t):
            wait_until(lambda each=each: renewed(each), 60)


def renewed(lab):
    """True if the certificate of a switch is of these hours."""
    found = member.load(lab.folder, "switch").certificate
    return site_folder.utc_now() - found.not_valid_before_utc < HOUR


def test_a_lab_that_has_expired_certifies_itself_again_and_a_revoked_one_not(
    clock, tmp_path
):
    """All were off for a week: neither certificates nor lists of before serve."""
    with federation(tmp_path) as (s, t, u, revoked):
        for each in (s, t, u):
            each.stop()
        issuer = authority.LocalAuthority(s.folder)
        for folder in (s.folder, t.folder, u.folder):
            two_labs.expire(folder, issuer)
        past = site_folder.utc_now() - two_labs.PAST
        at(past, issuer.revoke, "lab-v")
        for folder in (t.folder, u.folder):
            listed = revocation.RevocationList(folder)
            at(past, listed.accept, at(past, issuer.revocation_list)[1])
        t.__init__(t.folder, listens=True, port=t.address[1])  # which dials nobody
        u.__init__(u.folder, peers=[t.peer])
        s.__init__(s.folder, listens=True, port=s.address[1])
        wait_until(lambda: "lab-t" in u.switch.state.lines, 60)
        exchange_between(t, u)
        renewal = member.renewal_request(revoked, "switch")[1]
        with pytest.raises(joining.JoinError, match="was revoked"):
            joining.ask(revoked, {"op": "renew", **renewal.fields()})
        is_refused(revoked, t)


@pytest.mark.parametrize("is_dialed", [False, True])
def test_both_sides_say_that_a_certificate_has_expired(tmp_path, is_dialed):
    """The authority is away, and neither switch has known the other before."""
    first = two_labs.found(tmp_path / "s")
    ask, is_away = two_labs.issuer_in_this_process(first), False

    async def asked(fields):
        if is_away:
            raise site_folder.FederationError("the process of the authority has ended")
        return await ask(fields)

    with contextlib.ExitStack() as stack:
        s = two_labs.Running(first, listens=True, issuer=asked)
        stack.callback(s.stop)
        folder = two_labs.join(tmp_path / "t", first, s.address)
        two_labs.expire(folder, authority.LocalAuthority(first))
        is_away = True
        peers = [] if is_dialed else [s.peer]
        t = two_labs.Running(folder, listens=True, peers=peers)
        stack.callback(t.stop)
        if is_dialed:
            s.stop()
            s.__init__(first, peers=[t.peer], issuer=asked)
        for lab, other in ((s, "lab-t"), (t, "lab-s")):
            wait_until(lambda lab=lab: "expired" in shown(lab))
            about = {"job": "m3", "from": "generator:0", "to": "discriminator"}
            with pytest.raises(inner.Absent, match="expired"):
                inner.request(lab.folder, 20.0, "dial", lab=other, **about)


def shown(lab):
    """What is wrong, as `nebula status` and `doctor` show it."""
    found = lab.call(requests.status, lab.switch.state, lab.switch.upkeep)
    return str([each for each in found if each.state == checkup.WRONG])


async def dialed(folder, peer):
    """What comes on a new line."""
    connection = await outside.dial(folder, *peer)
    return await connection.reader.readexactly(1)
