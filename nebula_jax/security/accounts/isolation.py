"""The part of a lab that an account has for itself: a work folder and its quotas.

Its jobs have names of their own (`accounts.job_name`), and its streams a share of the
line (`accounts.Limits`), which the switch gives them. All accounts of a lab are one
user of the machine: the folders keep out that machine's other users, and one account
from another by mistake, not a program that means to look.
"""

import contextlib
import os
import pathlib
import stat
from collections.abc import Iterable

from nebula_jax.security import accounts, private_files
from nebula_jax.security.accounts import (
    CREATED,
    Account,
    QuotaError,
    account_rows,
    identity_store,
    roles,
)

FOLDER = "users"  # in the folder of the federation


def work_folder(folder: pathlib.Path, account: Account) -> pathlib.Path:
    """Returns the work folder of an account, which is made if missing.

    Args:
      folder: of the federation.
      account: an active one.

    Returns:
      FOLDER/users/NAME, for this user of the machine alone.

    Raises:
      private_files.PrivateFileError: if a link or a file is there, or the folder is
        another user's or open to one.
      roles.DeniedError: if the account is not active.
    """
    roles.require_active(account)
    return private_files.folder(_path(folder, account, make=True))


def disk_used(folder: pathlib.Path, account: Account) -> int:
    """Returns the bytes of the files in an account's work folder.

    Links are not followed, and a file with several names counts once. What is removed
    meanwhile may count or not.

    Raises:
      private_files.PrivateFileError: if it is not what `work_folder` makes, or a part
        cannot be read, and so not be counted.
    """
    path = _path(folder, account)
    if os.path.lexists(path):
        private_files.folder(path)
    total, seen = 0, set()
    for where, _, names in os.walk(path, onerror=_unreadable):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                found = os.lstat(os.path.join(where, name))
                if stat.S_ISREG(found.st_mode) and found.st_ino not in seen:
                    if found.st_nlink > 1:
                        seen.add(found.st_ino)
                    total += found.st_size
    return total


def check_disk(folder: pathlib.Path, account: Account, wanted: int = 0) -> None:
    """Checks that an account may write to its work folder.

    Args:
      folder: of the federation.
      account: whose limits count.
      wanted: bytes that it is about to write.

    Raises:
      QuotaError: if it would have more than its quota.
    """
    quota = account.limits.disk_bytes
    if quota is None:
        return
    used = disk_used(folder, account)
    if used + wanted > quota:
        raise QuotaError(
            f"{_path(folder, account)}: {used} of {quota} bytes are used, so {wanted}"
            " more do not fit: remove files, or get a larger quota"
        )


def charge(store: identity_store.Store, name: str, count: int) -> None:
    """Charges an account with bytes that have crossed the line.

    All of them are charged, whatever its quota and its state are: they have crossed.
    Whether more may is `barred`'s matter. Each call is a write to disk, so charge for
    many frames at once.

    Args:
      store: of the accounts.
      name: of the account.
      count: bytes.

    Raises:
      accounts.IdentityError: if there is no such account.
      QuotaError: if no account can have so many.
      identity_store.StoreError: if they cannot be written; then none is charged.
    """
    if not 0 <= count <= accounts.MOST_BYTES:
        raise QuotaError(f"{name}: {count} bytes cannot be charged")
    with store.writing() as connection:
        total = account_rows.account(connection, name).charged_bytes + count
        connection.execute(
            "UPDATE accounts SET charged_bytes = ? WHERE name = ?", (total, name)
        )


def check_quota(account: Account) -> None:
    """Checks that an account has something left of its quota over the line.

    Raises:
      QuotaError: if it has not.
    """
    quota = account.limits.quota_bytes
    if quota is not None and account.charged_bytes >= quota:
        raise QuotaError(
            f"{account.name}: its quota of {quota} bytes over the line is used up: get"
            " a larger one"
        )


def barred(listing: Iterable[Account]) -> dict[str, str]:
    """Returns the accounts of which nothing may cross the line, with the reasons.

    One that is not active yet is not among them: it can have no token, and once it is
    active it need not wait for the next listing.

    Args:
      listing: accounts, as they are at present.

    Returns:
      Name -> the reason.
    """
    found = {}
    for account in listing:
        if account.state == CREATED:
            continue
        try:
            roles.require_active(account)
            check_quota(account)
        except (roles.DeniedError, QuotaError) as error:
            found[account.name] = str(error)
    return found


def _path(folder: pathlib.Path, account: Account, make: bool = False) -> pathlib.Path:
    accounts.check_name(account.name)  # it becomes part of a path
    users = folder / FOLDER
    if make:
        private_files.folder(users)
    return users / account.name


def _unreadable(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise private_files.PrivateFileError(
            f"{error.filename}: cannot be read, so its size is unclear:"
            f" {error.strerror}"
        ) from None
