"""Tokens: what a person who has logged in shows from then on.

A token is 32 random bytes as text. The store has the SHA-256 of each login's token, by
which it is looked up: who reads the store finds no token, and the time of a comparison
reveals none. The work folder of the account has the token itself, for its trainers.

The owner of the lab's folder needs no login: whoever can read FOLDER/owner.token can
read the keys beside it. It lasts until the owner's password changes.

To a process of another account of the lab, an account proves that it has a token,
without sending it: all trainers of a lab have one certificate, which shows the lab and
not the account. The proof is a MAC under the token's digest, over what it is for. Who
can read the store could make one: that is the user whose folder it is.
"""

import hashlib
import hmac
import json
import pathlib
import re
import secrets
from collections.abc import Sequence

from nebula_jax import errors
from nebula_jax.security import private_files
from nebula_jax.security.membership import site_folder

LIFETIME = 24 * 3600.0  # seconds
NAME = "token"  # in the work folder of an account
OWNER = "owner.token"  # in the folder of the federation
PROOF_BYTES = 32
_PURPOSE = b"nebula token proof 1\0"
_TOKEN = re.compile(r"[A-Za-z0-9_-]{43}")


class TokenError(errors.NebulaError):
    """A token that is not, or no longer, anybody's."""


def new() -> str:
    """Makes a token."""
    return secrets.token_urlsafe(32)


def digest(token: str) -> bytes:
    """Returns what the store has of a token.

    Raises:
      TokenError: if it is no token; the message does not repeat it.
    """
    if not _TOKEN.fullmatch(token):
        raise TokenError("this is no token: log in to get one")
    return hashlib.sha256(token.encode("ascii")).digest()


def read(folder: site_folder.Folder, account: str) -> str:
    """Returns the token of an account that has logged in; of the owner if empty.

    Args:
      folder: of the lab.
      account: its name, or empty.

    Raises:
      private_files.PrivateFileError: if it has not, or others can read the file.
    """
    if not account:
        return owner(folder.path)
    path = folder.user(account) / NAME
    if not path.exists():
        raise private_files.PrivateFileError(
            f"{account} is not logged in: nebula login {account}"
        )
    return private_files.read(path).strip()


def owner(folder: pathlib.Path) -> str:
    """Returns the token of the owner of a folder, which is made if there is none.

    Raises:
      private_files.PrivateFileError: if others can read the file, or it holds no token.
    """
    path = folder / OWNER
    if not path.exists():
        replace_owners(folder)
    token = private_files.read(path).strip()
    if not _TOKEN.fullmatch(token):
        raise private_files.PrivateFileError(
            f"{path}: is no token: remove it, and the next command makes another"
        )
    return token


def replace_owners(folder: pathlib.Path) -> None:
    """Gives the owner of a folder another token: the one before does not serve.

    Raises:
      private_files.PrivateFileError: if the disk does not take it.
    """
    private_files.write(folder / OWNER, new() + "\n")


def prove(token: str, about: Sequence[str]) -> bytes:
    """Makes a proof that an account has a token.

    Args:
      token: of the account.
      about: all that the proof is for, such as a lab and a number drawn by who checks.

    Raises:
      TokenError: if it is no token.
    """
    return _mac(digest(token), about)


def is_proof(digest: bytes, about: Sequence[str], proof: bytes) -> bool:
    """Returns True if a proof was made with the token of a digest; see `prove`."""
    return hmac.compare_digest(_mac(digest, about), proof)


def _mac(key: bytes, about: Sequence[str]) -> bytes:
    text = json.dumps(list(about), separators=(",", ":")).encode()
    return hmac.digest(key, _PURPOSE + text, "sha256")
