"""The budget of a grant: rows, bytes and time, as a person types them."""

import datetime
import decimal
import math
import re
from typing import NamedTuple

from nebula_jax import errors, printable

MOST = 2**53
"""The largest number of rows or bytes: every JSON reader has it exactly."""

_NUMBER = re.compile(r"[0-9]{1,18}(\.[0-9]{1,18})?(e[0-9]{1,2})?", re.IGNORECASE)
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}(T[0-9]{2}:[0-9]{2}Z?)?")


class BudgetError(errors.NebulaError):
    """A budget that cannot be."""


class Budget(NamedTuple):
    """The bounds of a grant, at least one of them."""

    rows: int | None = None  # None: as many as there are
    nbytes: int | None = None  # as they cross; None: as many as there are
    until: float | None = None  # unix seconds, no more from then on; None: for ever


def check(budget: Budget, now: float) -> None:
    """Checks the budget of a grant that is given now (unix seconds).

    Raises:
      BudgetError: if it has no bound, or leaves nothing.
    """
    if budget == Budget():
        raise BudgetError("a grant has a bound: rows, bytes, or a day when it ends")
    for count, what in ((budget.rows, "rows"), (budget.nbytes, "bytes")):
        if count is not None and not 0 < count <= MOST:
            raise BudgetError(f"a grant has 1 to {MOST} {what}, not {count}")
    if budget.until is not None:
        if not math.isfinite(budget.until):
            raise BudgetError("a grant ends at a time, or has no end")
        if budget.until <= now:
            raise BudgetError(f"a grant until {date(budget.until)} is over already")


def count(text: str) -> int:
    """Returns a number of rows or bytes.

    >>> count("1e6"), count("2.5e3"), count("12")
    (1000000, 2500, 12)

    Args:
      text: decimal, with an exponent or not.

    Raises:
      BudgetError: if it is no whole number from 1 to MOST.
    """
    if _NUMBER.fullmatch(text):
        found = decimal.Decimal(text)
        if 0 < found <= MOST and found == found.to_integral_value():
            return int(found)
    raise BudgetError(
        f"{printable.line(repr(text))} is no whole number from 1 to {MOST}, as in"
        " 1000000 or 1e6"
    )


def time(text: str) -> float:
    """Returns when a day begins in UTC, or a minute of it, in unix seconds.

    A grant until 2027-01-01 serves for the last time on the day before.

    >>> time("2027-01-01")
    1798761600.0
    >>> time("2027-01-01T12:30Z") - time("2027-01-01")
    45000.0

    Raises:
      BudgetError: if it is no such day.
    """
    if _DATE.fullmatch(text):
        try:
            found = datetime.datetime.fromisoformat(text)
            return found.replace(tzinfo=datetime.UTC).timestamp()
        except ValueError:  # the 30th of February
            pass
    raise BudgetError(
        f"{printable.line(repr(text))} is no day, as in 2027-01-01, nor minute (UTC),"
        " as in 2027-01-01T12:30"
    )


def date(seconds: float) -> str:
    """Returns a time (unix seconds) as a person reads it, in UTC.

    >>> date(time("2027-01-01"))
    '2027-01-01 00:00 UTC'
    """
    try:
        found = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    except (OverflowError, ValueError, OSError):
        return f"{seconds:g} s after 1970"
    return f"{found:%Y-%m-%d %H:%M} UTC"
