"""Grants: items 81 and 82 of the suite, and processes that share one budget."""

import os
import pathlib
import re
import subprocess
import sys
from unittest import mock

import pytest
import tiny_accounts
from tiny_accounts import NOW, PATH, begin, grant, handle, person

from nebula_jax import errors
from nebula_jax.security.accounts import AccountError
from nebula_jax.security.grants import GrantError, Grants

ROOT = pathlib.Path(__file__).parents[2]
DAY = 24 * 3600.0


@pytest.fixture
def here(tmp_path):
    """A lab with corpus-es, ana and ben."""
    here = begin(tmp_path)
    handle(here)
    person(here, "ana")
    person(here, "ben")
    return here


def use(here, subject="ben", rows=16, now=NOW, handle="corpus-es"):
    """Counts a use; returns the rows that are left."""
    given = Grants(here)
    given.use(subject, handle, rows, now)
    (found,) = (each for each in given.listing() if each.subject == subject)
    return found.rows_left


def refused(here, words, **call):
    """Asserts that a use is refused in one line, and that nothing was counted."""
    before = Grants(here).listing()
    with pytest.raises(GrantError, match=re.escape(words)) as why:
        use(here, **call)
    assert str(why.value).isprintable()
    assert tiny_accounts.PATH not in str(why.value)
    assert Grants(here).listing() == before


def test_a_use_is_counted_before_it_is_served(here):
    grant(here, "ben", 100, NOW + DAY)
    assert use(here, rows=16) == 84
    assert use(here, rows=0) == 84  # before a session begins
    assert use(here, rows=84) == 0
    assert [each.rows_used for each in Grants(here).listing()] == [100]


def test_what_has_no_bound_has_none(here):
    grant(here, "ben", until=NOW + DAY)
    assert use(here, rows=2**40) is None


def test_one_account_cannot_use_the_grant_of_another(here):
    grant(here, "ben", 100)
    person(here, "eve")
    for subject in ("eve", "ben@lab-s", "ana", "owner"):  # not even the owner
        words = f"{subject} has no grant for corpus-es, or it was revoked: request one"
        refused(here, words, subject=subject)
    grant(here, "ben@lab-s", 100)
    use(here, "ben@lab-s")
    refused(here, "ben@lab-t has no grant", subject="ben@lab-t")


@pytest.mark.parametrize(
    "subject", ["", "..", "ben@", "ben@lab-s@lab-t", "\ud800", "ben\x00", "' OR 1=1"]
)
def test_what_is_no_subject(here, subject):
    refused(here, " has no grant for corpus-es", subject=subject)


def test_over_budget_nothing_is_served(here):
    grant(here, "ben", 100)
    use(here, rows=90)
    words = "has 10 rows left, and 16 were requested: read fewer, or get another from"
    refused(here, words)
    use(here, rows=10)
    for rows in (1, 0):
        words = "the grant of ben for corpus-es has no rows left: get another from"
        refused(here, words, rows=rows)


def test_an_expired_grant_ends_at_its_second(here):
    grant(here, "ben", 100, NOW + DAY)
    use(here, now=NOW + DAY - 0.001)
    words = "ended on 2027-01-16 08:00 UTC with 84 rows left: get another from"
    refused(here, words, now=NOW + DAY)
    grant(here, "ben", until=NOW + DAY)
    words = "ended on 2027-01-16 08:00 UTC: get another from"
    refused(here, words, now=NOW + DAY)


def test_a_grant_that_is_revoked_in_mid_stream_ends_at_the_next_batch(here):
    grant(here, "ben", 100)
    for _ in range(3):
        use(here)
    Grants(here).revoke("ben", "corpus-es")
    words = "ben has no grant for corpus-es, or it was revoked: request one from"
    refused(here, words)
    with pytest.raises(GrantError, match=words):
        Grants(here).revoke("ben", "corpus-es")
    grant(here, "ben", 5)
    use(here, rows=5)


def test_a_grant_rests_while_its_account_is_suspended(here):
    grant(here, "ben", 100)
    here.move("ben", "suspend")
    refused(here, "rests: the account is suspended")
    here.move("ben", "resume")
    use(here)
    here.move("ben", "suspend")
    here.move("ben", "remove")
    refused(here, "rests: the account is removed")
    with pytest.raises(AccountError, match="removed, which is final"):
        grant(here, "ben", 100)


def test_what_cannot_be_given(here):
    for bounds, words in {
        (None, None): "a grant has a bound",
        (0, None): "1 to 9007199254740992 rows, not 0",
        (-1, None): "rows, not -1",
        (2**53 + 1, None): "1 to 9007199254740992 rows, not",
        (None, NOW): "a grant until 2027-01-15 08:00 UTC is over already",
    }.items():
        with pytest.raises(GrantError, match=re.escape(words)):
            grant(here, "ben", *bounds)
    with pytest.raises(GrantError, match="no handle corpus-de"):
        grant(here, "ben", 1, name="corpus-de")
    for subject in ("nobody", "ben@", "ben@.."):
        with pytest.raises(errors.NebulaError, match=r"is no lab|no account nobody"):
            grant(here, subject, 1)
    assert Grants(here).listing() == []


def test_a_later_grant_replaces_an_earlier_one(here):
    grant(here, "ben", 100)
    use(here, rows=90)
    grant(here, "ben", 20)
    assert use(here, rows=16) == 4
    assert [each.rows_used for each in Grants(here).listing()] == [16]


def test_one_word_for_people(here):
    given = grant(here, "ben", 16, NOW + DAY)
    assert given.status(NOW) == "active"
    assert given.status(NOW + DAY) == "expired"
    use(here)
    assert Grants(here).listing()[0].status(NOW) == "spent"


def test_changes_are_recorded_or_not_made(here):
    record = here._record = tiny_accounts.Records()
    given = Grants(here)
    grant(here, "ben", 100, NOW + DAY)
    use(here)
    given.revoke("ben", "corpus-es")
    (_, what), (kind, after) = record
    assert what["until"] == "2027-01-16 08:00 UTC"
    assert (kind, after["rows"], after["rows_used"]) == ("grant.revoke", 100, 16)
    here._record = mock.Mock(side_effect=OSError("no space left for the audit log"))
    with pytest.raises(OSError, match="audit log"):
        grant(here, "ben", 1)
    with pytest.raises(OSError, match="audit log"):
        handle(here, "corpus-fr")
    assert given.listing() == []
    assert [each.name for each in given.handles()] == ["corpus-es"]


BAD_NAMES = [
    *("", ".", "..", "../corpus", "/data/es", "a/b", "a\\b", "a.b", "C:", "corpus es"),
    *("/dev/zero", "corpus\x00", "corpus\n", "-a", "Corpus", "é", "a" * 60, "\ud800"),
    *("~", "*", "corpus%2f..", "handle:corpus", "'--"),
]


def test_everybody_sees_what_a_handle_says_and_nobody_the_path(here):
    data, here._record = Grants(here), tiny_accounts.Records()
    made = handle(here, "corpus-fr")
    assert made == ("corpus-fr", 1000, "ab" * 32, "News, 2019.")
    assert data.handles()[1] == made
    assert PATH not in repr([data.handles(), here._record])
    assert data.provider("corpus-fr") == ({"path": PATH}, made)


@pytest.mark.parametrize("name", BAD_NAMES)
def test_no_path_is_a_handle(here, name):
    for call in (lambda: handle(here, name), lambda: Grants(here).provider(name)):
        with pytest.raises(GrantError, match="is no handle's name") as why:
            call()
        assert str(why.value).isprintable()
    refused(here, "is no handle's name", handle=name)


def test_names_of_handles(here):
    for name in ["a", "0", "a" * 59, "2019-news"]:
        assert handle(here, name).name == name


def test_a_name_is_given_once(here):
    for words, call in {
        "there is a handle corpus-es already": lambda: handle(here),
        "there is no handle corpus-de": lambda: Grants(here).provider("corpus-de"),
    }.items():
        with pytest.raises(GrantError, match=words):
            call()
    refused(here, "there is no handle corpus-de", handle="corpus-de")


CONSUMER = """
import pathlib, sys, time
import tiny_accounts
from nebula_jax.security import grants
given, served = grants.Grants(tiny_accounts.reopen(pathlib.Path(sys.argv[1]))), 0
print("ready", flush=True)
sys.stdin.readline()
try:
    while True:
        rows = 1 + served % 7
        given.use("ben", "corpus-es", rows, tiny_accounts.NOW)
        served += rows
        time.sleep(0.002)  # a batch is made and sent
except grants.GrantError:
    print(served, flush=True)
"""


def test_four_processes_together_never_get_more_than_the_budget(here):
    grant(here, "ben", 3001)
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "helpers")])
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CONSUMER, str(here.store.path.parent)],
            env=os.environ | {"PYTHONPATH": paths},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    for child in children:
        assert child.stdout.readline() == "ready\n"
    for child in children:
        print(file=child.stdin, flush=True)
    served = [int(child.communicate(timeout=60)[0]) for child in children]
    (found,) = Grants(here).listing()
    assert sum(served) == found.rows_used <= 3001
    assert found.rows_used > 3001 - 7
    assert sum(map(bool, served)) > 1
