"""The accounts of one lab: their life, and whose a token is.

An account is added with its first password (`logins.add`), may be suspended and
resumed, and is removed for good: its name is never given again. Each change is checked
against the role of who makes it, in the transaction that makes it, and recorded.

The account of the folder's own user exists from the start and needs no password: its
token is in the folder (`tokens.owner`).
"""

import hmac
import pathlib
import sqlite3
from collections.abc import Sequence
from typing import Self

import argon2

from nebula_jax.security import accounts, private_files
from nebula_jax.security.accounts import Account, IdentityError, Limits, roles, tokens
from nebula_jax.security.accounts import store as store_lib


class Identity:
    """The accounts in one folder; several processes may have it open.

    `begin` makes the accounts of a folder, `open` opens them. Methods that change an
    account take `by`, who makes the change, as `account_of` returned it.

    Attributes:
      folder: of the federation.
      store: the file, which records each change.
      hasher: of passwords.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        store: store_lib.Store,
        hasher: argon2.PasswordHasher | None,
    ) -> None:
        self.folder, self.store = folder, store
        # By default argon2id with 64 MiB and 3 passes, RFC 9106.
        self.hasher = hasher or argon2.PasswordHasher()

    @classmethod
    def begin(
        cls,
        folder: pathlib.Path,
        owner: str,
        hasher: argon2.PasswordHasher | None = None,
        record: store_lib.Record = store_lib.unrecorded,
    ) -> Self:
        """Makes the accounts of a folder: its owner's. A second time changes nothing.

        Args:
          folder: of the federation; made if only it is missing.
          owner: the name of the account, see `accounts.name_for`.
          hasher: of passwords; argon2id if None.
          record: is called for each change.

        Raises:
          IdentityError: if the folder has another owner.
          store.StoreError: if the file does not serve.
          private_files.PrivateFileError: if others can use the folder or the file.
        """
        accounts.check_name(owner)
        folder = private_files.folder(folder.resolve())
        store_lib.create(folder / store_lib.NAME)
        made = cls.open(folder, hasher, record)
        try:
            with made.store.writing() as connection:
                query = "SELECT name FROM accounts WHERE owns_folder"
                before = connection.execute(query).fetchone()
                if before is None:
                    first = Account(
                        owner, roles.OWNER, accounts.ACTIVE, Limits(), 0, True
                    )
                    insert(made.store, connection, owner, first, None)
                elif before["name"] != owner:
                    raise IdentityError(
                        f"{folder}: belongs to account {before['name']}, not to {owner}"
                    )
            tokens.owner(folder)
        except BaseException:
            made.close()
            raise
        return made

    @classmethod
    def open(
        cls,
        folder: pathlib.Path,
        hasher: argon2.PasswordHasher | None = None,
        record: store_lib.Record = store_lib.unrecorded,
    ) -> Self:
        """Opens the accounts of a folder; for arguments and errors see `begin`."""
        folder = private_files.folder(folder.resolve())
        return cls(folder, store_lib.Store(folder / store_lib.NAME, record), hasher)

    def close(self) -> None:
        """Closes the file."""
        self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def account_of(self, token: str, now: float) -> Account:
        """Returns the account that a token is of, as it is at present.

        Raises:
          tokens.TokenError: if it is nobody's, revoked or expired.
        """
        digest = tokens.digest(token)
        rows = self.store.rows(
            "SELECT accounts.*, tokens.expires FROM tokens"
            " JOIN accounts ON accounts.name = tokens.account WHERE tokens.digest = ?",
            (digest,),
        )
        if rows:
            found, expires = _account(rows[0]), rows[0]["expires"]
            if now >= expires:
                raise tokens.TokenError(
                    f"this token of {found.name} has expired: log in again"
                )
            if found.state != accounts.ACTIVE:
                raise tokens.TokenError(f"account {found.name} is {found.state}")
            return found
        owners = tokens.digest(tokens.owner(self.folder))
        if not hmac.compare_digest(owners, digest):
            raise tokens.TokenError(
                "this token was revoked, or is of another folder: log in again"
            )
        return _account(self.store.rows("SELECT * FROM accounts WHERE owns_folder")[0])

    def has_token(
        self, name: str, about: Sequence[str], proof: bytes, now: float
    ) -> bool:
        """Returns True if a proof shows that an account has a token that serves.

        Args:
          name: of the account.
          about: see `tokens.prove`.
          proof: as it came.
          now: unix seconds.
        """
        query = "SELECT digest FROM tokens WHERE account = ? AND expires > ?"
        digests = [row["digest"] for row in self.store.rows(query, (name, now))]
        if self.find(name).owns_folder:
            digests.append(tokens.digest(tokens.owner(self.folder)))
        return any(tokens.is_proof(each, about, proof) for each in digests)

    def find(self, name: str) -> Account:
        """Returns an account in whatever state.

        Raises:
          IdentityError: if there is none of this name.
        """
        with self.store.writing() as connection:
            return account(connection, name)

    def listing(self) -> list[Account]:
        """Returns all accounts, by name, those removed too."""
        rows = self.store.rows("SELECT * FROM accounts ORDER BY name")
        return [_account(row) for row in rows]

    def move(self, by: Account, name: str, event: str) -> Account:
        """Moves an account along the table of transitions.

        An account that is not active has no tokens. If it is removed, its work folder
        and the record of its grants stay.

        Args:
          by: the account that does it.
          name: of the account.
          event: `suspend`, `resume` or `remove`.

        Raises:
          IdentityError: if it is not there, in another state, or the folder's owner.
          roles.DeniedError: if `by` may not.
        """
        operation = "account.remove" if event == "remove" else "account.suspend"
        with self.store.writing() as connection:
            before = _changed(connection, by, operation, name)
            _check_not_owner(before, event)
            after = accounts.next_state(name, before.state, event)
            query = "UPDATE accounts SET state = ? WHERE name = ?"
            connection.execute(query, (after, name))
            if after != accounts.ACTIVE:
                revoke_tokens(connection, name)
            if after == accounts.REMOVED:
                query = "UPDATE accounts SET password = NULL WHERE name = ?"
                connection.execute(query, (name,))
            what = {"name": name, "before": before.state, "after": after}
            self.store.record(f"account.{event}", by.name, **what)
            return before._replace(state=after)

    def set_role(self, by: Account, name: str, role: str) -> Account:
        """Gives another account a role; its tokens have it at once.

        Raises:
          IdentityError: if the account is not there, is removed, or is the folder's
            owner.
          roles.DeniedError: if `by` may not, or it is its own account.
        """
        with self.store.writing() as connection:
            before = _changed(connection, by, "account.role", name)
            roles.require_over(actor(connection, by), "account.role", name, role)
            check_not_removed(before)
            _check_not_owner(before, "get another role")
            query = "UPDATE accounts SET role = ? WHERE name = ?"
            connection.execute(query, (role, name))
            what = {"name": name, "before": before.role, "after": role}
            self.store.record("account.role", by.name, **what)
            return before._replace(role=role)

    def set_limits(self, by: Account, name: str, limits: Limits) -> Account:
        """Sets the share of the line and the quota of an account.

        Raises:
          IdentityError: if the account is not there, or a limit is out of bounds.
          roles.DeniedError: if `by` may not.
        """
        accounts.check_limits(limits)
        with self.store.writing() as connection:
            before = _changed(connection, by, "account.limits", name)
            check_not_removed(before)
            query = "UPDATE accounts SET share = ?, quota_bytes = ? WHERE name = ?"
            connection.execute(query, (*limits, name))
            what = {"name": name, **limits._asdict()}
            self.store.record("account.limits", by.name, **what)
            return before._replace(limits=limits)

    def charge(self, name: str, count: int) -> None:
        """Charges an account with bytes that have crossed the line.

        All are charged, whatever its quota and its state are: they have crossed.
        Whether more may cross, `accounts.barred` says. Each call writes to the disk.

        Raises:
          IdentityError: if there is no such account.
          store.StoreError: if they cannot be written; then none is charged.
        """
        with self.store.writing() as connection:
            total = account(connection, name).charged_bytes + count
            query = "UPDATE accounts SET charged_bytes = ? WHERE name = ?"
            connection.execute(query, (total, name))

    def work_folder(self, account: Account) -> pathlib.Path:
        """Returns the work folder of an active account, which is made if missing.

        All accounts of a lab are one user of the machine: the folder keeps out other
        users, and other accounts by mistake, not a program that means to look.

        Raises:
          private_files.PrivateFileError: if a link or a file is there, or the folder is
            another user's or open to one.
          roles.DeniedError: if the account is not active.
        """
        roles.require_active(account)
        accounts.check_name(account.name)  # it becomes part of a path
        users = private_files.folder(self.folder / "users")
        return private_files.folder(users / account.name)


# Accounts as a transaction sees them: what was read before it may have changed.


def row(connection: sqlite3.Connection, name: str) -> sqlite3.Row | None:
    """Returns the row of an account, with its secrets; None if there is none."""
    if not accounts.is_name(name):  # and perhaps no text that SQLite takes
        return None
    query = "SELECT * FROM accounts WHERE name = ?"
    found: sqlite3.Row | None = connection.execute(query, (name,)).fetchone()
    return found


def account(connection: sqlite3.Connection, name: str) -> Account:
    """Returns an account in whatever state; raises IdentityError if there is none."""
    found = row(connection, name)
    if found is None:
        shown = name if accounts.is_name(name) else "of this name"
        raise IdentityError(f"there is no account {shown}")
    return _account(found)


def actor(connection: sqlite3.Connection, by: Account) -> Account:
    """Returns who acts, as the account is now.

    Raises:
      IdentityError: if there is no such account.
      roles.DeniedError: if it is not active any more.
    """
    found = account(connection, by.name)
    roles.require_active(found)
    return found


def check_not_removed(account: Account) -> None:
    """Checks that an account is not gone for good; raises IdentityError if it is."""
    if account.state == accounts.REMOVED:
        raise IdentityError(f"account {account.name} is removed, which is final")


def insert(
    store: store_lib.Store,
    connection: sqlite3.Connection,
    by: str,
    new: Account,
    password: str | None,
) -> None:
    """Inserts an account, with the hash of its password if it has one."""
    values = (*new[:3], *new.limits, *new[4:], password)
    query = "INSERT INTO accounts VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
    connection.execute(query, values)
    store.record("account.add", by, name=new.name, role=new.role)


def revoke_tokens(connection: sqlite3.Connection, name: str) -> None:
    """Revokes the tokens of all logins of an account."""
    connection.execute("DELETE FROM tokens WHERE account = ?", (name,))


def _changed(
    connection: sqlite3.Connection, by: Account, operation: str, name: str
) -> Account:
    """Returns the account that `by` is about to change, if that is permitted."""
    acting, found = actor(connection, by), account(connection, name)
    roles.require_over(acting, operation, name, found.role)
    return found


def _check_not_owner(account: Account, what: str) -> None:
    if account.owns_folder:
        raise IdentityError(
            f"account {account.name} cannot {what}: the folder belongs to it"
        )


def _account(row: sqlite3.Row) -> Account:
    name, role, state, share, quota, charged, owns_folder = row[:7]
    limits = Limits(share, quota)
    return Account(name, role, state, limits, charged, bool(owns_folder))
