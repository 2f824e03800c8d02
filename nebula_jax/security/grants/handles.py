"""Handles: data that others may read through an interface, and never as files.

The owner of a corpus registers it as a handle. Everybody in the federation may see what
the handle says of it. The settings behind it, such as a path, are read with `provider`
by the process that serves it, and by no consumer. `grants` has who may read how much.
"""

import json
import re
import sqlite3
from collections.abc import Mapping
from typing import Any, NamedTuple

from nebula_jax import errors, printable, strict_json
from nebula_jax.security.accounts import Account, identity, roles
from nebula_jax.security.accounts import store as store_lib

OPEN, WITHDRAWN = "open", "withdrawn"

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")


class DataError(errors.NebulaError):
    """A handle that is not there or cannot be."""


class Handle(NamedTuple):
    """A corpus as everybody may see it: nothing in it leads to the files."""

    name: str
    owner: str
    rows: int
    vocabulary: str  # SHA-256 in hexadecimal
    about: str  # a line for people
    state: str  # OPEN or WITHDRAWN


def is_name(name: str) -> bool:
    """Returns True if a handle may have this name; no path is one."""
    return bool(_NAME.fullmatch(name))


def check_name(name: str) -> None:
    """Checks the name of a handle.

    Raises:
      DataError: if no handle may have it.
    """
    if not is_name(name):
        raise DataError(
            f"{printable.line(repr(name))} is no handle's name: those have up to 64"
            " small letters, digits and -, as in corpus-es"
        )


class Handles:
    """The handles in a lab's store."""

    def __init__(self, store: store_lib.Store) -> None:
        self._store = store

    def register(
        self,
        by: Account,
        name: str,
        provider: Mapping[str, Any],
        rows: int,
        vocabulary: str,
        about: str,
    ) -> Handle:
        """Registers a corpus; the account is its owner from then on.

        Args:
          by: the owner.
          name: of the handle; it is never given to another.
          provider: JSON object that the serving process understands, such as
            {"text_folder": "/data/es"}. No consumer gets it.
          rows: of the corpus.
          vocabulary: digest of the vocabulary whose ids are served.
          about: a line for people.

        Raises:
          DataError: if the name is taken or is none.
          roles.DeniedError: if `by` may not.
        """
        check_name(name)
        made = Handle(name, by.name, rows, vocabulary, printable.line(about, 500), OPEN)
        with self._store.writing() as connection:
            roles.require(identity.actor(connection, by), "data.register")
            if _row(connection, name) is not None:
                raise DataError(f"there is a handle {name} already, or there was")
            query = "INSERT INTO handles VALUES (?, ?, ?, ?, ?, ?, ?)"
            connection.execute(query, (*made, json.dumps(dict(provider))))
            what = {"handle": name, "rows": rows, "vocabulary": vocabulary}
            self._store.record("data.register", by.name, **what)
            return made

    def withdraw(self, by: Account, name: str) -> Handle:
        """Withdraws a handle for good: every use of it is refused from now on.

        Raises:
          DataError: if there is no such handle.
          roles.DeniedError: if `by` may not.
        """
        with self._store.writing() as connection:
            found = handle(connection, name)
            actor = identity.actor(connection, by)
            roles.require_data(actor, "data.register", found.owner)
            query = "UPDATE handles SET state = ? WHERE name = ?"
            connection.execute(query, (WITHDRAWN, name))
            self._store.record("data.withdraw", by.name, handle=name)
            return found._replace(state=WITHDRAWN)

    def listing(self) -> list[Handle]:
        """Returns all handles, by name; everybody may see them."""
        rows = self._store.rows("SELECT * FROM handles ORDER BY name")
        return [Handle(*row[:-1]) for row in rows]

    def find(self, name: str) -> Handle:
        """Returns a handle; everybody may see it.

        Raises:
          DataError: if there is none of this name.
        """
        with self._store.writing() as connection:
            return handle(connection, name)

    def provider(self, by: Account, name: str) -> dict[str, Any]:
        """Returns the settings behind a handle, for the process that serves it.

        Args:
          by: the owner of the handle, or of the lab.
          name: of the handle.

        Raises:
          DataError: if there is no such handle, or it was withdrawn.
          roles.DeniedError: if `by` may not.
        """
        with self._store.writing() as connection:  # `by` as it is now
            found = handle(connection, name)
            actor = identity.actor(connection, by)
            roles.require_data(actor, "data.serve", found.owner)
            if found.state != OPEN:
                raise DataError(f"handle {name} is {found.state}: its data are gone")
            row = _row(connection, name)
        try:
            settings: dict[str, Any] = strict_json.loads(row["provider"] if row else "")
        except ValueError:
            raise DataError(f"the settings of {name} are damaged") from None
        return settings


def handle(connection: sqlite3.Connection, name: str) -> Handle:
    """Returns a handle as a transaction sees it; raises DataError if there is none."""
    check_name(name)
    row = _row(connection, name)
    if row is None:
        raise DataError(f"there is no handle {name}: see which there are")
    return Handle(*row[:-1])


def _row(connection: sqlite3.Connection, name: str) -> sqlite3.Row | None:
    query = "SELECT * FROM handles WHERE name = ?"
    row: sqlite3.Row | None = connection.execute(query, (name,)).fetchone()
    return row
