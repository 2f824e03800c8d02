"""The accounts of one lab: their life, and whose a token is.

An account is created, gets its first password and is active, may be suspended and
resumed, and is removed for good: its name is never given again. Each change is checked
against the role of who makes it, in the transaction that makes it, and recorded.

The account of the folder's own user exists from the start. It needs no password: its
token is in FOLDER/owner.token, which trainers show if no account is named.
"""

import pathlib
import sqlite3
from typing import Self

from nebula_jax.security import accounts, private_files
from nebula_jax.security.accounts import (
    Account,
    IdentityError,
    account_rows,
    identity_store,
    owner_token,
    passwords,
    roles,
    tokens,
)


class Identity:
    """The accounts in one folder; several processes may have it open.

    `begin` makes the accounts of a folder, `open` opens them. Methods that change an
    account take `by`, who makes the change, as `account_of` returned it.

    Attributes:
      folder: of the federation.
      store: the file.
      hasher: of passwords.
      record: is called for each change.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        store: identity_store.Store,
        hasher: passwords.Hasher | None,
        record: identity_store.Record,
    ) -> None:
        self.folder = folder
        self.store = store
        self.hasher = hasher or passwords.argon2id()
        self.record = record

    @classmethod
    def begin(
        cls,
        folder: pathlib.Path,
        owner: str,
        now: float,
        hasher: passwords.Hasher | None = None,
        record: identity_store.Record = identity_store.unrecorded,
    ) -> Self:
        """Makes the accounts of a folder: its owner's. A second time changes nothing.

        Args:
          folder: of the federation; made if only it is missing.
          owner: the name of the account, see `accounts.name_for`.
          now: unix seconds.
          hasher: of passwords; argon2id if None.
          record: is called for each change.

        Raises:
          IdentityError: if the folder has another owner.
          identity_store.StoreError: if the file does not serve.
          private_files.PrivateFileError: if others can use the folder or the file.
        """
        accounts.check_name(owner)
        folder = private_files.folder(folder.resolve())
        identity_store.create(folder / identity_store.NAME)
        made = cls.open(folder, hasher, record)
        try:
            made._begin(owner, now)
        except BaseException:
            made.close()
            raise
        return made

    @classmethod
    def open(
        cls,
        folder: pathlib.Path,
        hasher: passwords.Hasher | None = None,
        record: identity_store.Record = identity_store.unrecorded,
    ) -> Self:
        """Opens the accounts of a folder; for arguments and errors see `begin`."""
        folder = private_files.folder(folder.resolve())
        store = identity_store.Store(folder / identity_store.NAME)
        return cls(folder, store, hasher, record)

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
        rows = self.store.rows(
            "SELECT accounts.*, tokens.expires FROM tokens"
            " JOIN accounts ON accounts.name = tokens.account WHERE tokens.digest = ?",
            (tokens.digest(token),),
        )
        if not rows:
            raise tokens.TokenError(
                "this token was revoked, or is of another folder: log in again"
            )
        found, expires = accounts.from_row(rows[0]), rows[0]["expires"]
        if expires is not None and now >= expires:
            raise tokens.TokenError(
                f"this token of {found.name} has expired: log in again"
            )
        if found.state != accounts.ACTIVE:
            raise tokens.TokenError(f"account {found.name} is {found.state}")
        return found

    def owner_token(self) -> str:
        """Returns the token of the folder's owner, from its file.

        Raises:
          private_files.PrivateFileError: if it is missing, or others can read it.
        """
        return owner_token.read(self.folder)

    def renew_owner_token(self, now: float) -> None:
        """Gives the folder's owner a token, if the one in its file does not serve.

        Raises:
          private_files.PrivateFileError: if others can read the file.
          identity_store.StoreError: if it cannot be written.
        """
        with self.store.writing() as connection:
            self._renew_owner_token(connection, account_rows.owner(connection), now)

    def find(self, name: str) -> Account:
        """Returns an account in whatever state.

        Raises:
          IdentityError: if there is none of this name.
        """
        for each in self.listing():
            if each.name == name:
                return each
        raise account_rows.missing(name)

    def listing(self) -> list[Account]:
        """Returns all accounts, by name, those removed too."""
        rows = self.store.rows("SELECT * FROM accounts ORDER BY name")
        return [accounts.from_row(row) for row in rows]

    def add(self, by: Account, name: str, role: str, now: float) -> Account:
        """Adds an account, which can do nothing until it is activated.

        Raises:
          IdentityError: if the name is taken, or ever was.
          roles.DeniedError: if `by` may not add one with this role.
        """
        accounts.check_name(name)
        roles.check(role)
        with self.store.writing() as connection:
            actor = account_rows.actor(connection, by)
            roles.require_over(actor, "account.add", name, role)
            if before := account_rows.row(connection, name):
                raise IdentityError(
                    f"there is an account {name} already"
                    if before["state"] != accounts.REMOVED
                    else f"account {name} was removed: its name is not given again"
                )
            account_rows.insert(connection, self.record, by.name, name, role, now)
            return account_rows.account(connection, name)

    def activate(self, by: Account, name: str, password: str) -> Account:
        """Activates an account that was created, with its first password.

        Raises:
          IdentityError: if it is not there, or in another state.
          passwords.PasswordError: if the password does not serve.
          roles.DeniedError: if `by` may not.
        """
        return self._change(by, name, "activate", "account.add", password)

    def suspend(self, by: Account, name: str) -> Account:
        """Suspends an account: its tokens are revoked. For errors see `activate`."""
        return self._change(by, name, "suspend", "account.suspend")

    def resume(self, by: Account, name: str) -> Account:
        """Makes a suspended account active. For errors see `activate`."""
        return self._change(by, name, "resume", "account.suspend")

    def remove(self, by: Account, name: str) -> Account:
        """Removes an account for good, suspended before. For errors see `activate`.

        Its work folder and the record of its grants stay.
        """
        return self._change(by, name, "remove", "account.remove")

    def set_role(self, by: Account, name: str, role: str) -> Account:
        """Gives another account a role; its tokens have it at once.

        Raises:
          IdentityError: if the account is not there, is removed, or is the folder's
            owner.
          roles.DeniedError: if `by` may not, or it is its own account.
        """
        roles.check(role)
        with self.store.writing() as connection:
            actor, before = _both(connection, by, "account.role", name)
            roles.require_over(actor, "account.role", name, role)
            account_rows.check_not_removed(before)
            account_rows.check_not_owner(connection, name, "get another role")
            connection.execute(
                "UPDATE accounts SET role = ? WHERE name = ?", (role, name)
            )
            self.record(
                "account.role", by.name, name=name, before=before.role, after=role
            )
            return account_rows.account(connection, name)

    def set_limits(self, by: Account, name: str, limits: accounts.Limits) -> Account:
        """Sets the share of bandwidth and the quotas of an account.

        Raises:
          IdentityError: if the account is not there, or a limit is out of bounds.
          roles.DeniedError: if `by` may not.
        """
        accounts.check_limits(limits)
        with self.store.writing() as connection:
            _, before = _both(connection, by, "account.limits", name)
            account_rows.check_not_removed(before)
            connection.execute(
                "UPDATE accounts SET share = ?, quota_bytes = ?, disk_bytes = ?"
                " WHERE name = ?",
                (*limits, name),
            )
            self.record("account.limits", by.name, name=name, **limits._asdict())
            return account_rows.account(connection, name)

    def _begin(self, owner: str, now: float) -> None:
        with self.store.writing() as connection:
            before = account_rows.owner(connection)
            if before is None:
                record = self.record
                account_rows.insert(connection, record, owner, owner, roles.OWNER, now)
                account_rows.move(connection, record, owner, owner, "activate")
                connection.execute("INSERT INTO settings VALUES ('owner', ?)", (owner,))
            elif before != owner:
                raise IdentityError(
                    f"{self.folder}: belongs to account {before}, not to {owner}"
                )
            self._renew_owner_token(connection, owner, now)

    def _renew_owner_token(
        self, connection: sqlite3.Connection, owner: str | None, now: float
    ) -> None:
        if owner and not owner_token.serves(self.folder, connection, owner):
            owner_token.replace(self.folder, connection, owner, now)

    def _change(
        self, by: Account, name: str, event: str, operation: str, password: str = ""
    ) -> Account:
        """Moves an account along the table of transitions."""
        hashed = None
        if event == "activate":
            text = passwords.new(password)
            with self.store.writing() as connection:  # denied before any work
                _, before = _both(connection, by, operation, name)
                accounts.next_state(name, before.state, event)
            hashed = passwords.hashed(self.hasher, text)
        with self.store.writing() as connection:
            _both(connection, by, operation, name)
            account_rows.check_not_owner(connection, name, event)
            account_rows.move(connection, self.record, by.name, name, event)
            if hashed is not None:
                account_rows.set_password(connection, name, hashed)
            return account_rows.account(connection, name)


def _both(
    connection: sqlite3.Connection, by: Account, operation: str, name: str
) -> tuple[Account, Account]:
    """Returns who acts and the account that it is done to, if that is permitted."""
    actor = account_rows.actor(connection, by)
    found = account_rows.account(connection, name)
    roles.require_over(actor, operation, name, found.role)
    return actor, found
