"""Names, states and limits of accounts: pure."""

import contextlib
import doctest
import itertools

import pytest

from nebula_jax.security import accounts
from nebula_jax.security.accounts import Account, IdentityError, Limits

BAD_NAMES = [
    *("", ".", "..", "../etc", "/dev/zero", "a/b", "a\\b", "a.b", "a b", "a\n", "-a"),
    *("1a", "Ana", "änn", "ana\x00", "ana@lab-s", "a" * 33, "٣", "con", "nul", "com1"),
    *("\ud800", "ana\u202e", "*", "~root", "ana;ls", "'--"),
]
ANA = Account("ana", "researcher", "active", Limits(), 0, 0.0)


def test_docstrings():
    found = doctest.testmod(accounts)
    assert found.attempted
    assert not found.failed


@pytest.mark.parametrize("name", ["ana", "a", "ana-2", "a" * 32, "root"])
def test_names(name):
    accounts.check_name(name)


@pytest.mark.parametrize("name", BAD_NAMES)
def test_what_is_no_name(name):
    assert not accounts.is_name(name)
    with pytest.raises(IdentityError, match="is no account's name") as why:
        accounts.check_name(name)
    assert str(why.value).isprintable()


@pytest.mark.parametrize(
    ("user", "name"),
    [
        ("root", "root"),
        ("John.Doe", "john-doe"),
        ("DOMAIN\\ana", "domain-ana"),
        ("7ana", "ana"),
        ("ana_maria_" * 9, "ana-maria-ana-maria-ana-maria-an"),
        *[(bad, "owner") for bad in ("", "٣", "---", "con", "..")],
    ],
)
def test_the_account_of_a_user_of_the_machine(user, name):
    assert accounts.name_for(user) == name


def test_the_life_of_an_account_is_one_table():
    states = ("created", "active", "suspended", "removed")
    events = {event for _, event in accounts.TRANSITIONS}
    possible = {}
    for state, event in itertools.product(states, events):
        with contextlib.suppress(IdentityError):
            possible[state, event] = accounts.next_state("ana", state, event)
    assert possible == {
        ("created", "activate"): "active",
        ("created", "remove"): "removed",
        ("active", "suspend"): "suspended",
        ("suspended", "resume"): "active",
        ("suspended", "remove"): "removed",
    }
    with pytest.raises(IdentityError, match="possible: nothing, this is final"):
        accounts.next_state("ana", "removed", "resume")
    with pytest.raises(IdentityError, match="ana is suspended, so it cannot suspend"):
        accounts.next_state("ana", "suspended", "suspend")


@pytest.mark.parametrize(
    "limits",
    [
        *[Limits(share) for share in (0, -1, float("nan"), float("inf"), 1001)],
        *(Limits(quota_bytes=-1), Limits(quota_bytes=2**63), Limits(disk_bytes=-1)),
    ],
)
def test_limits_that_cannot_be(limits):
    with pytest.raises(IdentityError):
        accounts.check_limits(limits)


def test_limits():
    accounts.check_limits(Limits())
    accounts.check_limits(Limits(0.001, 0, 2**50))


def test_a_lab_vouches_only_for_names_that_hold_no_lab():
    assert accounts.split_subject("ana@lab-s") == ("ana", "lab-s")
    assert accounts.split_subject("ana") == ("ana", "")
    for name, lab in [("ana@lab-t", "lab-s"), ("ana", "lab:0"), ("ana", "")]:
        with pytest.raises(IdentityError):
            accounts.vouched(name, lab)
    for subject in ("ana@", "@lab-s", "ana@lab-s@lab-t", "ana@Lab", "", "ana@..", "@"):
        with pytest.raises(IdentityError):
            accounts.split_subject(subject)


def test_jobs_of_two_accounts_never_have_one_name():
    assert accounts.job_name(ANA, "m3") == "ana/m3"
    assert accounts.split_job("ana/m3.es_2") == ("ana", "m3.es_2")
    accounts.check_own_job(ANA, "ana/m3")
    with pytest.raises(IdentityError, match="ben/m3 is a job of ben, not of ana"):
        accounts.check_own_job(ANA, "ben/m3")
    for job in ("", "..", "a/b", "../ben/m3", "m3\n", "a" * 65, "m 3"):
        with pytest.raises(IdentityError, match="is no job's name"):
            accounts.job_name(ANA, job)
    for text in ("m3", "ana/", "/m3", "ana/b/c", "ana/..", "Ana/m3", "ana@lab-s/m3"):
        with pytest.raises(IdentityError, match="is no job of an account"):
            accounts.split_job(text)
