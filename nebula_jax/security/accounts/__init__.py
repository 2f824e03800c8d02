"""An account: the name of a person in a lab, a role, and a life that ends for good.

Pure: names and states. `identity` keeps accounts, `roles` has what they may do.
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from nebula_jax import errors, printable
from nebula_jax.security import names

ACTIVE, SUSPENDED, REMOVED = "active", "suspended", "removed"

TRANSITIONS: Mapping[tuple[str, str], str] = {
    (ACTIVE, "suspend"): SUSPENDED,
    (SUSPENDED, "resume"): ACTIVE,
    (SUSPENDED, "remove"): REMOVED,
}
"""(state, event) -> the next state. Nothing else happens to an account; nothing follows
removal, and an active account is suspended first, so that no slip is final."""

MOST_BYTES = 2**50
"""The largest quota: sums of bytes stay far below 2**63."""
MOST_SHARE = 1000.0

_NAME = re.compile(r"[a-z][a-z0-9-]{0,31}")


class IdentityError(errors.NebulaError):
    """An account that is not there, or that cannot be what it was to become."""


class Limits(NamedTuple):
    """The part of the lab's line that an account has."""

    share: float = 1.0  # weight of its streams on a line that is full
    quota_bytes: int | None = None  # over the line, in all; None: no limit


class Account(NamedTuple):
    """An account as everybody may see it: no secret is in it."""

    name: str
    role: str
    state: str
    limits: Limits
    charged_bytes: int  # of quota_bytes
    owns_folder: bool = False  # the account of the folder's own user


def next_state(name: str, state: str, event: str) -> str:
    """Returns the state of an account after an event, such as `suspend`.

    Raises:
      IdentityError: if the table has no such transition; names the account.
    """
    if (state, event) not in TRANSITIONS:
        possible = [each for before, each in TRANSITIONS if before == state]
        raise IdentityError(
            f"account {name} is {state}, so it cannot {event};"
            f" possible: {' or '.join(possible) or 'nothing, this is final'}"
        )
    return TRANSITIONS[state, event]


def barred(listing: Iterable[Account]) -> dict[str, str]:
    """Returns the accounts of which nothing may cross the line: name -> reason."""
    found = {}
    for name, _, state, limits, charged_bytes, _ in listing:
        quota = limits.quota_bytes
        if state != ACTIVE:
            found[name] = f"{name} may do nothing: it is {state}"
        elif quota is not None and charged_bytes >= quota:
            found[name] = (
                f"{name}: its quota of {quota} bytes over the line is used up: get a"
                " larger one"
            )
    return found


def is_name(name: str) -> bool:
    """Returns True if an account may have this name, which a folder gets too."""
    return bool(_NAME.fullmatch(name))


def check_name(name: str) -> None:
    """Checks the name of an account.

    Raises:
      IdentityError: if no account may have it.
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
    name = re.sub(r"[^a-z0-9]+", "-", user.lower()).lstrip("0123456789-")
    return name[:32].rstrip("-") or "owner"


def check_limits(limits: Limits) -> None:
    """Checks the limits that an account is to have.

    Raises:
      IdentityError: if the share or the quota is out of bounds.
    """
    share, quota = limits
    if not (math.isfinite(share) and 0 < share <= MOST_SHARE):
        raise IdentityError(
            f"a share of the line is more than 0 and at most {MOST_SHARE:g}, not"
            f" {share:g}"
        )
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
      IdentityError: if the subject is neither `ana` nor `ana@lab-s`.
    """
    name, at, lab = subject.partition("@")
    if at:
        vouched(name, lab)
    else:
        check_name(name)
    return name, lab
