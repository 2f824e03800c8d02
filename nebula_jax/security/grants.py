"""Data by grant: corpora that others read through an interface, and never as files.

The owner of a lab registers a corpus as a handle. Everybody may see what the handle
says of it. The settings behind it, such as a path, are read with `provider` by the
process that serves it, and by no consumer.

A grant is who may read how much of which handle until when. A use is checked and
counted before it is served, in one change of the file: however many processes serve a
grant, together they never serve more than its budget. A process that is killed leaves
a use that was counted and perhaps not served, never one served and not counted.

The subject of a use is who the switches say has dialed: an account of this lab, whose
user its switch knows from the kernel, or one of another lab, as in `ana@lab-s`, for
which that lab vouches. It is never taken from what a reader sends.
"""

import datetime
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from nebula_jax import errors, printable
from nebula_jax.security import accounts, store

MOST = 2**53  # the largest number of rows: every JSON reader has it exactly
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,58}")
"""A handle's name is a part of its job's, which has up to 64 characters."""


class GrantError(errors.NebulaError):
    """A handle or a grant that is not there or cannot be, or a use that none permits.

    The use is over for the consumer, with a checkpoint.
    """


class Handle(NamedTuple):
    """A corpus as everybody may see it: nothing in it leads to the files."""

    name: str
    rows: int
    vocabulary: str  # SHA-256 in hexadecimal
    about: str  # a line for people


class Grant(NamedTuple):
    """A grant with its bounds, at least one of them, and what was used of it."""

    subject: str  # `ana`, or `ana@lab-s`
    handle: str
    rows: int | None = None  # None: as many as there are
    until: float | None = None  # unix seconds of a date; None: for ever
    rows_used: int = 0

    @property
    def rows_left(self) -> int | None:
        """The rows that may still be read; None if there is no bound."""
        return None if self.rows is None else self.rows - self.rows_used

    def status(self, now: float) -> str:
        """Returns one word for people: `active`, `spent` or `expired`."""
        if self.until is not None and now >= self.until:
            return "expired"
        return "spent" if self.rows_left == 0 else "active"


def is_name(name: str) -> bool:
    """Returns True if a handle may have this name; no path is one."""
    return bool(_NAME.fullmatch(name))


def check_name(name: str) -> None:
    """Raises GrantError if no handle may have a name."""
    if not is_name(name):
        raise GrantError(
            f"{printable.line(repr(name))} is no handle's name: those have up to 59"
            " small letters, digits and -, as in corpus-es"
        )


def date(seconds: float) -> str:
    """Returns a time (unix seconds) as a person reads it, in UTC.

    >>> date(1_800_000_000)
    '2027-01-15 08:00 UTC'
    """
    found = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return f"{found:%Y-%m-%d %H:%M} UTC"


class Grants:
    """The handles and grants of a lab, in the file of its accounts."""

    def __init__(self, people: accounts.Accounts) -> None:
        self._people, self._store = people, people.store

    def register(
        self,
        name: str,
        provider: Mapping[str, Any],
        rows: int,
        vocabulary: str,
        about: str,
    ) -> Handle:
        """Registers a corpus; raises GrantError if the name is taken or is none.

        The name is never given to another. `provider` is a JSON object that the serving
        process understands, such as {"text_folder": "/data/es"}, and no consumer gets;
        `vocabulary` is the digest of the vocabulary whose ids are served.
        """
        check_name(name)
        made = Handle(name, rows, vocabulary, printable.line(about, 500))
        with self._store.changing() as tables:
            if name in tables["handles"]:
                raise GrantError(f"there is a handle {name} already")
            tables["handles"][name] = [*made[1:], dict(provider)]
            what = {"handle": name, "rows": rows, "vocabulary": vocabulary}
            self._people.record("data.register", **what)
        return made

    def handles(self) -> list[Handle]:
        """Returns all handles, by name."""
        tables = self._store.read()
        return [_handle(tables, name)[0] for name in sorted(tables["handles"])]

    def provider(self, name: str) -> tuple[dict[str, Any], Handle]:
        """Returns a handle and what is behind it; raises GrantError without one."""
        found, settings = _handle(self._store.read(), name)
        return settings, found

    def give(self, given: Grant, now: float) -> None:
        """Gives a grant, in place of an earlier one of the subject for the handle.

        Nothing of it is used, whatever was of an earlier one. Raises
        accounts.AccountError if it is for this lab, which has no such account;
        GrantError if it leaves nothing, or there is no such handle.
        """
        if given.rows is None and given.until is None:
            raise GrantError("a grant has a bound: rows, or a day when it ends")
        if given.rows is not None and not 0 < given.rows <= MOST:
            raise GrantError(f"a grant has 1 to {MOST} rows, not {given.rows}")
        if given.until is not None and given.until <= now:
            raise GrantError(f"a grant until {date(given.until)} is over already")
        accounts.check_subject(given.subject)
        with self._store.changing() as tables:
            _handle(tables, given.handle)
            if "@" not in given.subject:
                accounts.check_not_removed(accounts.account(tables, given.subject))
            _keep(tables, given)
            self._people.record("grant.give", **_public(given))

    def revoke(self, subject: str, handle: str) -> None:
        """Revokes a grant: its next use is refused; raises GrantError without one."""
        with self._store.changing() as tables:
            found = _grant(tables, subject, handle)
            del tables["grants"][f"{subject} {handle}"]
            self._people.record("grant.revoke", **_public(found))

    def listing(self) -> list[Grant]:
        """Returns all grants in the order in which they were given first."""
        tables = self._store.read()
        return [_grant(tables, *key.split()) for key in tables["grants"]]

    def use(self, subject: str, handle: str, rows: int, now: float) -> None:
        """Counts a use that is about to be served; all of it or, if refused, nothing.

        `subject` is who reads, as proven; `handle` its name, as the consumer sent it;
        `rows` those to be served, or none before a session begins. Raises GrantError,
        in one line with what is left and what to do: then nothing may be served.
        """
        with self._store.changing() as tables:
            grant = _usable(tables, subject, handle, rows, now)
            _keep(tables, grant._replace(rows_used=grant.rows_used + rows))


_MORE = "get another from the owner of the data"


def _usable(
    tables: store.Tables, subject: str, handle: str, rows: int, now: float
) -> Grant:
    """Returns the grant for a use, which it permits."""
    _handle(tables, handle)
    found = _grant(tables, subject, handle)
    named, left = f"the grant of {subject} for {handle}", found.rows_left
    if "@" not in subject:
        account = accounts.account(tables, subject)
        if account.state != accounts.ACTIVE:
            raise GrantError(f"{named} rests: the account is {account.state}")
    if found.until is not None and now >= found.until:
        leaving = f" with {left} rows left" if left else ""
        raise GrantError(f"{named} ended on {date(found.until)}{leaving}: {_MORE}")
    if left == 0:
        raise GrantError(f"{named} has no rows left: {_MORE}")
    if left is not None and rows > left:
        raise GrantError(
            f"{named} has {left} rows left, and {rows} were requested: read fewer, or"
            f" {_MORE}"
        )
    return found


def _handle(tables: store.Tables, name: str) -> tuple[Handle, dict[str, Any]]:
    """Returns a handle, and the settings behind it."""
    check_name(name)
    if name not in tables["handles"]:
        raise GrantError(f"there is no handle {name}: see which there are")
    *seen, provider = tables["handles"][name]
    return Handle(name, *seen), provider


def _grant(tables: store.Tables, subject: str, handle: str) -> Grant:
    check_name(handle)
    key = f"{subject} {handle}"
    if key not in tables["grants"]:
        raise GrantError(
            f"{printable.line(subject)} has no grant for {handle}, or it was revoked:"
            " request one from the owner of the data"
        )
    return Grant(subject, handle, *tables["grants"][key])


def _keep(tables: store.Tables, grant: Grant) -> None:
    tables["grants"][f"{grant.subject} {grant.handle}"] = list(grant[2:])


def _public(grant: Grant) -> dict[str, Any]:
    """Returns what the audit log has of a grant."""
    until = None if grant.until is None else date(grant.until)
    return grant._asdict() | {"until": until}
