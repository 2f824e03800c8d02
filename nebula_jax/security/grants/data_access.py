"""Data that others may read through an interface, and never as files.

The owner of a corpus registers it as a handle. Everybody in the federation may see the
handle's schema and mock sample, and request more (`data_requests`). The settings behind
it, such as a path, are read with `provider` by the process that serves it, and by no
consumer. `grants` has who may read how much.
"""

import json
import re
import sqlite3
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from nebula_jax import errors, printable
from nebula_jax.security.accounts import Account, identity, roles
from nebula_jax.security.accounts import store as store_lib
from nebula_jax.security.grants import data_schema
from nebula_jax.security.grants.data_schema import Schema

OPERATIONS = ("schema", "lengths", "rows")
"""The operations that a grant may permit: to see how many rows are served and their
form, the lengths of rows in tokens, the rows themselves."""

OPEN, WITHDRAWN = "open", "withdrawn"
MOST_BYTES = 2**16  # of a provider's settings

_HANDLE = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")


class DataError(errors.NebulaError):
    """A handle, or a request for one, that is not there or cannot be."""


class Handle(NamedTuple):
    """A corpus as everybody may see it: nothing in it leads to the files."""

    name: str
    owner: str
    schema: Schema
    state: str  # OPEN or WITHDRAWN
    created: float  # unix seconds


def is_handle(name: str) -> bool:
    """Returns True if a handle may have this name; no path is one."""
    return bool(_HANDLE.fullmatch(name))


def check_handle(name: str) -> None:
    """Checks the name of a handle.

    Raises:
      DataError: if none may have it.
    """
    if not is_handle(name):
        raise DataError(
            f"{printable.line(repr(name))} is no handle's name: those have up to 64"
            " small letters, digits and -, as in corpus-es"
        )


def operations_of(names: Collection[str]) -> tuple[str, ...]:
    """Returns operations in the order of OPERATIONS, each once.

    Raises:
      DataError: if there are none, or one is not among them.
    """
    if odd := [name for name in names if name not in OPERATIONS]:
        raise DataError(
            f"{printable.line(repr(odd[0]))} is no operation on data: those are"
            f" {', '.join(OPERATIONS)}"
        )
    if not names:
        raise DataError(f"name an operation: {', '.join(OPERATIONS)}")
    return tuple(each for each in OPERATIONS if each in names)


class DataAccess:
    """The handles in a lab's store.

    Args:
      store: of the lab's accounts, see `identity.Identity`.
    """

    def __init__(self, store: store_lib.Store) -> None:
        self._store = store

    def register(
        self,
        by: Account,
        name: str,
        provider: Mapping[str, Any],
        schema: Schema,
        mock: Sequence[Mapping[str, Any]],
        now: float,
    ) -> Handle:
        """Registers a corpus; the account is its owner from then on.

        Args:
          by: the owner.
          name: of the handle; it is never given to another.
          provider: JSON object that the serving process understands, such as
            {"text_folder": "/data/es"}. No consumer gets it.
          schema: everybody sees it; see `data_schema.parse`.
          mock: invented rows of that form; everybody sees them.
          now: unix seconds.

        Raises:
          DataError: if the name is taken or is none, or the settings are no JSON.
          data_schema.SchemaError: if the sample has another form.
          roles.DeniedError: if `by` may not.
        """
        check_handle(name)
        settings = _settings(provider)
        described = data_schema.dumps(data_schema.parse(schema._asdict()))
        sample = data_schema.check_mock(schema, mock)
        with self._store.writing() as connection:
            roles.require(identity.actor(connection, by), "data.register")
            if _row(connection, name) is not None:
                raise DataError(f"there is a handle {name} already, or there was")
            connection.execute(
                "INSERT INTO handles (name, owner, provider, schema, mock, state,"
                " created) VALUES (?, ?, ?, ?, ?, ?, ?)",
                (name, by.name, settings, described, sample, OPEN, now),
            )
            self._store.record("data.register", by.name, handle=name, schema=described)
            return handle(connection, name)

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
            connection.execute(
                "UPDATE handles SET state = ? WHERE name = ?", (WITHDRAWN, name)
            )
            self._store.record("data.withdraw", by.name, handle=name)
            return handle(connection, name)

    def handles(self) -> list[Handle]:
        """Returns all handles, by name; everybody may see them."""
        rows = self._store.rows("SELECT * FROM handles ORDER BY name")
        return [_handle(row) for row in rows]

    def find(self, name: str) -> Handle:
        """Returns a handle; everybody may see it.

        Raises:
          DataError: if there is none of this name.
        """
        return _handle(self._find(name))

    def mock(self, name: str) -> list[dict[str, Any]]:
        """Returns the mock sample of a handle; everybody may see it.

        Raises:
          DataError: if there is none of this name.
        """
        sample: list[dict[str, Any]] = _json(self._find(name), "mock")
        return sample

    def provider(self, by: Account, name: str) -> dict[str, Any]:
        """Returns the settings behind a handle, for the process that serves it.

        Args:
          by: the owner of the handle, or of the lab.
          name: of the handle.

        Raises:
          DataError: if there is no such handle, or it was withdrawn.
          roles.DeniedError: if `by` may not.
        """
        row = self._find(name)
        with self._store.writing() as connection:  # `by` as it is now
            actor = identity.actor(connection, by)
        roles.require_data(actor, "data.serve", row["owner"])
        if row["state"] != OPEN:
            raise DataError(f"handle {name} is {row['state']}: there is no such data")
        settings: dict[str, Any] = _json(row, "provider")
        return settings

    def _find(self, name: str) -> sqlite3.Row:
        check_handle(name)
        rows = self._store.rows("SELECT * FROM handles WHERE name = ?", (name,))
        if not rows:
            raise _missing(name)
        return rows[0]


def handle(connection: sqlite3.Connection, name: str) -> Handle:
    """Returns a handle as a transaction sees it.

    Raises:
      DataError: if there is none of this name.
    """
    check_handle(name)
    row = _row(connection, name)
    if row is None:
        raise _missing(name)
    return _handle(row)


def _row(connection: sqlite3.Connection, name: str) -> sqlite3.Row | None:
    query = "SELECT * FROM handles WHERE name = ?"
    row: sqlite3.Row | None = connection.execute(query, (name,)).fetchone()
    return row


def _handle(row: sqlite3.Row) -> Handle:
    schema = data_schema.loads(row["schema"])
    return Handle(row["name"], row["owner"], schema, row["state"], row["created"])


def _json(row: sqlite3.Row, column: str) -> Any:
    try:
        return json.loads(row[column])
    except ValueError:
        raise DataError(f"the {column} of {row['name']} is damaged") from None


def _settings(provider: Mapping[str, Any]) -> str:
    try:
        text = json.dumps(dict(provider), allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise DataError("the settings of a provider are an object of JSON") from None
    if len(text) > MOST_BYTES:
        raise DataError(f"the settings of a provider have at most {MOST_BYTES} bytes")
    return text


def _missing(name: str) -> DataError:
    return DataError(f"there is no handle {name}: see which there are")
