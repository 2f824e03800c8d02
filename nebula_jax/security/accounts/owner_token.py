"""The token of the folder's own user: a file that trainers read.

It does not expire: whoever can read the file can read the keys beside it. It is
replaced with the owner's password.
"""

import pathlib
import sqlite3

from nebula_jax.security import private_files
from nebula_jax.security.accounts import tokens

NAME = "owner.token"  # in the folder of the federation


def read(folder: pathlib.Path) -> str:
    """Returns the token in a folder.

    Raises:
      private_files.PrivateFileError: if the file is missing, or others can read it.
    """
    return private_files.read(folder / NAME).strip()


def serves(folder: pathlib.Path, connection: sqlite3.Connection, owner: str) -> bool:
    """Returns True if the folder has a token of its owner.

    Raises:
      private_files.PrivateFileError: if others can read it.
    """
    if not (folder / NAME).exists():
        return False
    try:
        digest = tokens.digest(read(folder))
    except tokens.TokenError:
        return False
    query = "SELECT account FROM tokens WHERE digest = ?"
    row = connection.execute(query, (digest,)).fetchone()
    return row is not None and row["account"] == owner


def replace(
    folder: pathlib.Path, connection: sqlite3.Connection, owner: str, now: float
) -> None:
    """Revokes the owner's tokens and writes a new one.

    A crash between the file and the commit leaves a token that nobody has; the owner's
    next command `nebula` that needs one replaces it
    (`identity.Identity.renew_owner_token`).

    Args:
      folder: of the federation.
      connection: in a transaction that writes, which ends after this.
      owner: the name of the account.
      now: unix seconds.

    Raises:
      private_files.PrivateFileError: if the disk does not take it.
    """
    tokens.revoke(connection, owner)
    token = tokens.give(connection, owner, now, None)
    private_files.write(folder / NAME, token + "\n")
