import datetime
import doctest
import re

import pytest

from nebula_jax.security.grants import budgets
from nebula_jax.security.grants.budgets import Budget, BudgetError

NOW = 1_800_000_000.0


def test_docstrings():
    found = doctest.testmod(budgets)
    assert found.attempted
    assert not found.failed


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *[("1e6", 10**6), ("1E6", 10**6), ("1000000", 10**6), ("1.5e3", 1500)],
        *[("12.0", 12), ("007", 7), ("1", 1), (str(2**53), 2**53), ("0.5e1", 5)],
    ],
)
def test_numbers(text, number):
    assert budgets.count(text) == number
    assert type(budgets.count(text)) is int


@pytest.mark.parametrize(
    "text",
    [
        *("", "0", "-1", "+1", "1.5", "1e-3", "nan", "inf", "1e99", "1e999999999"),
        *("1_000", "1,000", "٣", " 1", "1\n", "0x10", "1e", "e6", "1" * 50, "10 GB"),
        str(2**53 + 1),
    ],
)
def test_what_is_no_number_of_rows(text):
    with pytest.raises(BudgetError, match="is no whole number from 1 to"):
        budgets.count(text)


def test_a_grant_until_a_day_ends_when_it_begins_in_utc():
    utc = datetime.UTC
    day = datetime.datetime(2027, 1, 1, tzinfo=utc).timestamp()
    assert budgets.time("2027-01-01") == day
    assert budgets.time("2027-01-01T00:01") == budgets.time("2027-01-01T00:01Z")
    assert budgets.time("2027-01-01T00:01") == day + 60
    assert budgets.date(day) == "2027-01-01 00:00 UTC"
    assert budgets.date(1e300) == "1e+300 s after 1970"


@pytest.mark.parametrize(
    "text",
    [
        *("", "2027", "2027-13-01", "2027-02-30", "01-01-2027", "2027-01-01T25:00"),
        *("2027-01-01 12:00", "2027-01-01T12:00+02:00", "2027-W01-1", "tomorrow"),
        *("2027-01-01\n", "٢٠٢٧-01-01", "0000-01-01"),
    ],
)
def test_what_is_no_day(text):
    with pytest.raises(BudgetError, match="is no day"):
        budgets.time(text)


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        (Budget(), "a grant has a bound"),
        (Budget(rows=0), "1 to 9007199254740992 rows, not 0"),
        (Budget(rows=-1), "rows, not -1"),
        (Budget(nbytes=2**53 + 1), "bytes, not"),
        (Budget(until=NOW), "a grant until 2027-01-15 08:00 UTC is over already"),
        (Budget(1, 1, float("nan")), "ends at a time"),
        (Budget(1, 1, float("inf")), "ends at a time"),
    ],
)
def test_budgets_that_leave_nothing(budget, words):
    with pytest.raises(BudgetError, match=re.escape(words)):
        budgets.check(budget, NOW)


def test_budgets():
    for budget in (Budget(1), Budget(None, 2**53), Budget(until=NOW + 1)):
        budgets.check(budget, NOW)
