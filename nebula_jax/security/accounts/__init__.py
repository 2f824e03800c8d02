"""An account: the name of a person in a lab, a role, and a life that ends for good.

Pure: names and states. `identity` keeps accounts, `roles` has what they may do.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from nebula_jax import errors, printable
from nebula_jax.security import names

CREATED, ACTIVE, SUSPENDED, REMOVED = "created", "active", "suspended", "removed"

TRANSITIONS: Mapping[tuple[str, str], str] = {
    (CREATED, "activate"): ACTIVE,
    (CREATED, "remove"): REMOVED,
    (ACTIVE, "suspend"): SUSPENDED,
    (SUSPENDED, "resume"): ACTIVE,
    (SUSPENDED, "remove"): REMOVED,
}
"""(state, event) -> the next state. Nothing else happens to an account; nothing follows
removal, and one that is active is suspended first, so that no slip is final."""

MOST_BYTES = 2**50
"""The largest quota and the largest single charge: sums stay far below 2**63."""
MOST_SHARE = 1000.0

_NAME = re.compile(r"[a-z][a-z0-9-]{0,31}")
_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DEVICES = frozenset(
    ["con", "prn", "aux", "nul"]
    + [f"{device}{number}" for device in ("com", "lpt") for number in range(10)]
)


class IdentityError(errors.NebulaError):
    """An account that is not there, or that cannot be what it was to become."""


class QuotaError(errors.NebulaError):
    """A quota that is used up; whoever gave it can give more."""


class Limits(NamedTuple):
    """The part of the lab's resources that an account has."""

    share: float = 1.0  # weight of its streams on a line that is full
    quota_bytes: int | None = None  # over the line, in all; None: no limit
    disk_bytes: int | None = None  # in its work folder; None: no limit


class Account(NamedTuple):
    """An account as everybody may see it: no secret is in it."""

    name: str
    role: str
    state: str
    limits: Limits
    charged_bytes: int  # of quota_bytes
    created: float  # unix seconds


def from_row(row: Any) -> Account:
    """Returns the account in a row of the table `accounts`."""
    limits = Limits(row["share"], row["quota_bytes"], row["disk_bytes"])
    return Account(
        row["name"],
        row["role"],
        row["state"],
        limits,
        row["charged_bytes"],
        row["created"],
    )


def next_state(name: str, state: str, event: str) -> str:
    """Returns the state of an account after an event.

    Args:
      name: of the account, for the message.
      state: before.
      event: such as `suspend`.

    Raises:
      IdentityError: if the table has no such transition.
    """
    if (state, event) not in TRANSITIONS:
        possible = [each for before, each in TRANSITIONS if before == state]
        raise IdentityError(
            f"account {name} is {state}, so it cannot {event};"
            f" possible: {' or '.join(possible) or 'nothing, this is final'}"
        )
    return TRANSITIONS[state, event]


def is_reserved(name: str) -> bool:
    """Returns True if some systems take this name for a device."""
    return name in _DEVICES


def is_name(name: str) -> bool:
    """Returns True if an account may have this name, which a folder gets too."""
    return bool(_NAME.fullmatch(name)) and not is_reserved(name)


def check_name(name: str) -> None:
    """Checks the name of an account.

    Raises:
      IdentityError: if none may have it.
    """
    if not is_name(name):
        raise IdentityError(
            f"{printable.line(repr(name))} is no account's name: those have up to 32"
            " small letters, digits and -, a letter first, as in ana"
        )


def name_for(user: str) -> str:
    """Returns the name of an account for a user of this machine.

    >>> name_for("Ana.Maria")
    'ana-maria'
    >>> name_for("42")
    'owner'
    """
    name = re.sub(r"[^a-z0-9]+", "-", user.lower()).lstrip("0123456789-")[:32]
    name = name.rstrip("-")
    return name if is_name(name) else "owner"


def check_limits(limits: Limits) -> None:
    """Checks what an account is to have.

    Raises:
      IdentityError: if a share or a quota is out of bounds.
    """
    share = limits.share
    if not (math.isfinite(share) and 0 < share <= MOST_SHARE):
        raise IdentityError(
            f"a share of bandwidth is more than 0 and at most {MOST_SHARE:g}, not"
            f" {share:g}"
        )
    for quota in (limits.quota_bytes, limits.disk_bytes):
        if quota is not None and not 0 <= quota <= MOST_BYTES:
            raise IdentityError(f"a quota has 0 to {MOST_BYTES} bytes, not {quota}")


def vouched(name: str, lab: str) -> str:
    """Returns the subject of a grant for an account of another lab.

    The lab is the one that its certificate names, whatever its switch reports: a lab
    vouches for its own accounts and for no other's.

    >>> vouched("ana", "lab-s")
    'ana@lab-s'

    Raises:
      IdentityError: if one of the two is no name.
    """
    check_name(name)
    if not names.is_cluster(lab) or ":" in lab:
        raise IdentityError(
            f"{printable.line(repr(lab))} is no lab's name: those have small letters,"
            " digits and -, as in lab-s"
        )
    return f"{name}@{lab}"


def split_subject(subject: str) -> tuple[str, str]:
    """Returns the account and the lab of a subject; the lab is "" for this one.

    Raises:
      IdentityError: if it is neither `ana` nor `ana@lab-s`.
    """
    name, at, lab = subject.partition("@")
    if at:
        vouched(name, lab)
    else:
        check_name(name)
    return name, lab


def job_name(account: Account, job: str) -> str:
    """Returns the name of a job of an account: no two accounts have one name.

    Its streams carry it, so that one account cannot join another's.

    Args:
      account: whose job it is.
      job: its own name for it, such as `m3`.

    Returns:
      Both, as in `ana/m3`.

    Raises:
      IdentityError: if the job can have no such name.
    """
    check_name(account.name)
    if not _JOB.fullmatch(job):
        raise IdentityError(
            f"{printable.line(repr(job))} is no job's name: those have up to 64"
            " letters, digits, ., _ and -, as in m3"
        )
    return f"{account.name}/{job}"


def split_job(text: str) -> tuple[str, str]:
    """Returns the account's name and the job's in the name of a job.

    Raises:
      IdentityError: if it is no such name.
    """
    name, slash, job = text.partition("/")
    if not (slash and is_name(name) and _JOB.fullmatch(job)):
        raise IdentityError(
            f"{printable.line(repr(text))} is no job of an account, as in ana/m3"
        )
    return name, job


def check_own_job(account: Account, text: str) -> None:
    """Checks that a job is the account's own.

    Raises:
      IdentityError: if it is another's, or no job.
    """
    name, _ = split_job(text)
    if name != account.name:
        raise IdentityError(f"{text} is a job of {name}, not of {account.name}")
