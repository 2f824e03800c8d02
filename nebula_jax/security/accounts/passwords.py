"""Passwords: which are taken, and their hashes (argon2id, RFC 9106)."""

import contextlib
import threading
import unicodedata
from collections.abc import Iterator
from typing import Protocol

import argon2

from nebula_jax import errors

FEWEST_CHARACTERS = 12
MOST_BYTES = 1024
"""A sentence fits; hashing a longer one would cost time before anybody is known."""

AT_ONCE = 2
"""Passwords that a process hashes at a time: each takes 64 MiB and several cores, and
whoever may try to log in can start them."""
LONGEST_WAIT = 10.0  # seconds for one's turn
_turns = threading.BoundedSemaphore(AT_ONCE)


class PasswordError(errors.NebulaError):
    """A password that is not taken, or that cannot be checked at present."""


class Hasher(Protocol):
    """A hasher of passwords, as `argon2.PasswordHasher` is one."""

    def hash(self, password: str, /) -> str:
        """Returns a hash with its parameters and a salt of its own."""
        ...

    def verify(self, hash: str, password: str, /) -> bool:
        """Returns True, or raises `argon2.exceptions.VerifyMismatchError`."""
        ...

    def check_needs_rehash(self, hash: str, /) -> bool:
        """Returns True if the hash has parameters of former times."""
        ...


def argon2id() -> Hasher:
    """Returns the hasher for real accounts: argon2id with 64 MiB and 3 passes."""
    return argon2.PasswordHasher()


def new(password: str) -> str:
    """Returns a password that somebody chose in the form that is hashed.

    Args:
      password: any text of 12 characters or more, at most 1024 bytes.

    Returns:
      The text in normal form C: keyboards differ in how they write an accent.

    Raises:
      PasswordError: if it is too short or too long, or no text.
    """
    found = normal(password)
    if len(found) < FEWEST_CHARACTERS:
        raise PasswordError(
            f"a password has at least {FEWEST_CHARACTERS} characters, this one"
            f" {len(found)}"
        )
    return found


def normal(password: str) -> str:
    """Returns a password, of whatever length, in the form that is hashed.

    Raises:
      PasswordError: if it is too long, or no text.
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
    return found


def hashed(hasher: Hasher, password: str) -> str:
    """Returns the hash of a password that `new` has returned.

    Raises:
      PasswordError: if there is no memory for it, or no turn in LONGEST_WAIT.
    """
    with _turn():
        return hasher.hash(password)


def is_right(hasher: Hasher, stored: str | None, password: str) -> bool:
    """Returns True if a password is the one of a hash; takes equally long if not.

    Args:
      hasher: makes new hashes.
      stored: the hash; None if there is no account, or none that can log in.
      password: as `normal` returns it.

    Raises:
      PasswordError: see `hashed`; or if the stored hash is damaged.
    """
    with _turn():
        if stored is None:
            # The work of a verification, so that time does not reveal who has an
            # account. Nobody's hash would do as well, but would have to be kept.
            hasher.hash(password)
            return False
        try:
            return hasher.verify(stored, password)
        except argon2.exceptions.VerifyMismatchError:
            return False


@contextlib.contextmanager
def _turn() -> Iterator[None]:
    """Waits until few others hash; translates a failure of argon2."""
    if not _turns.acquire(timeout=LONGEST_WAIT):
        raise PasswordError("too many passwords are being checked: try again soon")
    try:
        yield
    except (
        argon2.exceptions.HashingError,
        argon2.exceptions.VerificationError,
        argon2.exceptions.InvalidHashError,
    ) as error:
        raise PasswordError(
            f"a password cannot be checked at present: argon2id failed ({error})"
        ) from None
    finally:
        _turns.release()
