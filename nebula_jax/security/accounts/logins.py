"""Passwords: adding a person with a first one, logging in, changing it.

A wrong name takes as long as a wrong password and is answered alike. Each failure makes
the next try wait longer: a try is counted before its password is hashed, and one that
comes too early is not hashed at all, so that tries side by side, in whatever processes,
are counted one by one. After 5 that fail at once, the next wait 1, 2, 4, ... seconds
and at most a quarter of an hour each: 10,000 tries take more than 100 days.

The price: whoever tries wrong passwords of an account makes its person wait up to a
quarter of an hour to log in. Tokens that were given before go on.
"""

import contextlib
import hashlib
import sqlite3
import unicodedata
from collections.abc import Iterator
from typing import NamedTuple

from argon2 import exceptions

from nebula_jax import errors
from nebula_jax.security import accounts
from nebula_jax.security.accounts import Account, identity, roles, tokens
from nebula_jax.security.accounts.identity import Identity

FEWEST_CHARACTERS = 12
MOST_BYTES = 1024
"""A sentence fits; hashing a longer one would cost time before anybody is known."""
FREE = 5
"""Tries without a wait: a person's slips."""
LONGEST = 900.0  # seconds to wait
BUCKETS = 1024
"""Counters of tries that all names without an account share."""
_WRONG = "no account has this name and password"


class PasswordError(errors.NebulaError):
    """A password that is not taken, or that cannot be checked at present."""


class LoginError(accounts.IdentityError):
    """A name and a password that do not belong together, or of no active account."""


class ThrottledError(LoginError):
    """A try to log in that came too early, whatever its password."""


class Login(NamedTuple):
    """A token, and whose it is until when (unix seconds)."""

    token: str
    account: Account
    expires: float

    def __repr__(self) -> str:
        return f"Login({self.account.name})"  # no token in a log


def add(people: Identity, by: Account, name: str, role: str, password: str) -> Account:
    """Adds an account with its first password.

    Args:
      people: the accounts.
      by: the account that adds it.
      name: of the new account.
      role: one of `roles.ROLES`.
      password: the first.

    Raises:
      accounts.IdentityError: if the name is taken, or ever was.
      PasswordError: if the password is not taken.
      roles.DeniedError: if `by` may not add an account with this role.
    """
    accounts.check_name(name)
    text = checked(password)
    with people.store.writing() as connection:  # denied before any work
        _check_may_add(connection, by, name, role)
    hashed = _hashed(people, text)
    with people.store.writing() as connection:
        _check_may_add(connection, by, name, role)
        made = Account(name, role, accounts.ACTIVE, accounts.Limits(), 0)
        identity.insert(people.store, connection, by.name, made, hashed)
        return made


def _check_may_add(
    connection: sqlite3.Connection, by: Account, name: str, role: str
) -> None:
    roles.require_over(identity.actor(connection, by), "account.add", name, role)
    if before := identity.row(connection, name):
        raise accounts.IdentityError(
            f"there is an account {name} already"
            if before["state"] != accounts.REMOVED
            else f"account {name} was removed: its name is not given again"
        )


def login(
    people: Identity,
    name: str,
    password: str,
    now: float,
    lifetime: float = tokens.LIFETIME,
) -> Login:
    """Logs a person in.

    Args:
      people: the accounts.
      name: of one, as somebody typed it.
      password: likewise.
      now: unix seconds.
      lifetime: of the token, in seconds.

    Raises:
      LoginError: if name and password do not belong together, or the account is not
        active; ThrottledError if it was tried too often.
      PasswordError: if the password cannot be checked at present.
    """
    proven = _prove(people, name, password, now)
    with people.store.writing() as connection:
        row = identity.row(connection, name)
        if row is None or row["password"] != proven:
            raise LoginError(_WRONG)  # it was changed in the meantime
        _forget_tries(connection, name)
        account = identity.account(connection, name)
        if account.state == accounts.ACTIVE:
            token, expires = tokens.new(), now + lifetime
            query = "DELETE FROM tokens WHERE account = ? AND expires <= ?"
            connection.execute(query, (name, now))
            query = "INSERT INTO tokens VALUES (?, ?, ?)"
            connection.execute(query, (tokens.digest(token), name, expires))
            people.store.record("login", name)
            return Login(token, account, expires)
    raise LoginError(f"account {name} is {account.state}")


def logout(people: Identity, token: str) -> None:
    """Revokes a token; one that is nobody's is no error.

    Raises:
      tokens.TokenError: if it cannot be one.
    """
    digest = tokens.digest(token)
    with people.store.writing() as connection:
        connection.execute("DELETE FROM tokens WHERE digest = ?", (digest,))


def set_password(
    people: Identity, by: Account, name: str, password: str, now: float, old: str = ""
) -> Account:
    """Sets a password, and revokes every token of the account.

    The folder's owner gets a new token in its file at once.

    Args:
      people: the accounts.
      by: the account itself, or one that may change it.
      name: of the account.
      password: the new one.
      now: unix seconds.
      old: the present one, if it is `by`'s own and there is one.

    Raises:
      accounts.IdentityError: if the account is not there, or is removed.
      LoginError: if the old one is wrong.
      PasswordError: if the new one is not taken.
      roles.DeniedError: if `by` may not.
    """
    text = checked(password)
    with people.store.writing() as connection:  # denied before any work
        _, has_one = _check_may_set(connection, by, name)
    if by.name == name and has_one:
        _prove(people, name, old, now)
    hashed = _hashed(people, text)
    with people.store.writing() as connection:
        account, _ = _check_may_set(connection, by, name)
        query = "UPDATE accounts SET password = ? WHERE name = ?"
        connection.execute(query, (hashed, name))
        _forget_tries(connection, name)
        identity.revoke_tokens(connection, name)
        people.store.record("account.password", by.name, name=name)
        if account.owns_folder:
            tokens.replace_owners(people.folder)
        return account


def has_password(people: Identity, name: str) -> bool:
    """Returns True if there is an account of this name that has a password."""
    query = "SELECT password IS NOT NULL FROM accounts WHERE name = ?"
    return any(row[0] for row in people.store.rows(query, (name,)))


def checked(password: str, fewest: int = FEWEST_CHARACTERS) -> str:
    """Returns a password in the form that is hashed.

    Args:
      password: any text of at most 1024 bytes.
      fewest: characters of a password that somebody chooses.

    Returns:
      The text in normal form C: keyboards differ in how they write an accent.

    Raises:
      PasswordError: if it is too short or too long, or no text.
    """
    if len(password) > MOST_BYTES:  # before any work on it
        raise PasswordError(f"a password has at most {MOST_BYTES} bytes")
    found = unicodedata.normalize("NFC", password)
    try:
        size = len(found.encode("utf-8"))
    except UnicodeEncodeError:  # half a character, from bytes that are no UTF-8
        raise PasswordError("a password is text in UTF-8") from None
    if size > MOST_BYTES:
        raise PasswordError(
            f"a password has at most {MOST_BYTES} bytes, this one {size}"
        )
    if len(found) < fewest:
        raise PasswordError(
            f"a password has at least {fewest} characters, this one {len(found)}"
        )
    return found


def _hashed(people: Identity, password: str) -> str:
    with _translated():
        return people.hasher.hash(password)


def _is_right(people: Identity, stored: str | None, password: str) -> bool:
    """Returns True if a password is the one of a hash; takes equally long if not."""
    with _translated():
        if stored is None:
            # The work of a verification, so that time does not reveal who has an
            # account. Nobody's hash would do as well, but would have to be kept.
            people.hasher.hash(password)
            return False
        try:
            return people.hasher.verify(stored, password)
        except exceptions.VerifyMismatchError:
            return False


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Translates a failure of argon2, such as want of memory or a damaged hash."""
    try:
        yield
    except (exceptions.Argon2Error, exceptions.InvalidHashError) as error:
        raise PasswordError(
            f"a password cannot be checked at present: argon2id failed ({error})"
        ) from None


def _prove(people: Identity, name: str, password: str, now: float) -> str:
    """Returns the hash that a password was found to fit; for errors see `login`."""
    try:
        text = checked(password, fewest=0)
    except PasswordError:
        raise LoginError(_WRONG) from None  # nobody's, so there is none to guess
    with people.store.writing() as connection:
        row = identity.row(connection, name)
        # Names without an account wait too: else the pace would tell who has one.
        who = name if row else _bucket(connection, name)
        seconds = _count_try(connection, who, now)
    if seconds:
        raise ThrottledError(
            f"too many tries to log in have failed: try again in {seconds:.0f} s"
        )
    stored: str | None = row["password"] if row else None
    if not _is_right(people, stored, text) or stored is None:
        # A name without an account may be a password, typed a line too early.
        people.store.record("login.refused", name if row else "")
        raise LoginError(_WRONG)
    return stored


def wait(failures: int) -> float:
    """Returns the seconds from a try to the next, after so many that failed."""
    if failures < FREE:
        return 0.0
    return min(2.0 ** min(failures - FREE, 30), LONGEST)


def _bucket(connection: sqlite3.Connection, name: str) -> str:
    """Returns under what a name without an account is counted, in a small table."""
    # Without the salt nobody can find two names of one bucket.
    salt = connection.execute("SELECT value FROM salt").fetchone()[0]
    digest = hashlib.sha256(salt + name.encode("utf-8", "surrogatepass")).digest()
    return f"?{int.from_bytes(digest[:8], 'big') % BUCKETS}"


def _count_try(connection: sqlite3.Connection, who: str, now: float) -> float:
    """Counts a try, and returns 0; or the seconds until one is taken again."""
    query = "SELECT failures, retry_at FROM tries WHERE who = ?"
    failures, retry_at = connection.execute(query, (who,)).fetchone() or (0, 0.0)
    if now < retry_at <= now + LONGEST:  # else the clock was set back
        return retry_at - now
    values = (who, failures + 1, now + wait(failures + 1))
    connection.execute("INSERT OR REPLACE INTO tries VALUES (?, ?, ?)", values)
    return 0.0


def _forget_tries(connection: sqlite3.Connection, name: str) -> None:
    connection.execute("DELETE FROM tries WHERE who = ?", (name,))


def _check_may_set(
    connection: sqlite3.Connection, by: Account, name: str
) -> tuple[Account, bool]:
    """Checks that `by` may set a password; returns whose, and whether it has one."""
    acting, found = identity.actor(connection, by), identity.account(connection, name)
    if by.name != name:
        roles.require_over(acting, "account.password", name, found.role)
    identity.check_not_removed(found)
    row = identity.row(connection, name)
    return found, row is not None and row["password"] is not None
