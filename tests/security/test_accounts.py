"""Accounts of users of the host: whose a request is, their life and their limits."""

import os

import pytest
import tiny_accounts
from tiny_accounts import USERS, begin, person, reopen

from nebula_jax import errors
from nebula_jax.security import accounts, private_files
from nebula_jax.security.accounts import AccountError, Limits

BAD_NAMES = [
    *("", ".", "..", "../etc", "/dev/zero", "a/b", "a\\b", "a.b", "a b", "a\n", "-a"),
    *("1a", "Ana", "änn", "ana\x00", "ana@lab-s", "a" * 33, "٣"),
    *("\ud800", "ana\u202e", "*", "~root", "ana;ls", "'--"),
]


@pytest.fixture
def record():
    return tiny_accounts.Records()


@pytest.fixture
def here(tmp_path, record):
    return begin(tmp_path / "federation", record=record)


@pytest.mark.parametrize("name", BAD_NAMES)
def test_what_is_no_name(here, name):
    assert not accounts.is_name(name)
    with pytest.raises(AccountError, match="is no account's name") as why:
        here.add(name, 60009)
    assert str(why.value).isprintable()
    with pytest.raises(AccountError, match="no account of this name"):
        here.move(name, "suspend")


def test_subjects_of_grants():
    for subject in ("ana", "ana@lab-s"):
        accounts.check_subject(subject)
    for subject in ("ana@", "@lab-s", "ana@lab-s@lab-t", "ana@Lab", "", "ana@..", "@"):
        with pytest.raises(errors.NebulaError, match="is no"):
            accounts.check_subject(subject)


def test_a_folder_has_an_owner_from_the_start(here, tmp_path):
    owner = here.find("owner")
    assert owner[:3] == ("owner", None, "active")
    assert owner.is_owner
    assert here.listing() == [owner]
    folder = tmp_path / "federation"
    assert {each.stat().st_mode & 0o777 for each in folder.iterdir()} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700
    person(here, "ana")
    again = begin(folder)  # changes nothing
    assert [each.name for each in again.listing()] == ["ana", "owner"]


def test_others_can_use_neither_the_folder_nor_the_file(here, tmp_path):
    folder = tmp_path / "federation"
    folder.chmod(0o755)
    for opened in (begin, reopen):
        with pytest.raises(private_files.PrivateFileError, match="chmod 700"):
            opened(folder)
    with pytest.raises(errors.NebulaError, match="not there: nebula init"):
        reopen(tmp_path).find("owner")


def test_whose_a_request_is_the_kernel_says_and_nothing_else(here):
    ana = person(here, "ana")
    assert here.of_user(os.geteuid()) == here.find("owner")
    assert here.of_user(USERS["ana"]) == ana
    for uid in (USERS["ben"], 0 if os.geteuid() else 1, -1, 2**32 - 1):
        with pytest.raises(
            AccountError, match=f"user {uid} of this host has no accoun"
        ):
            here.of_user(uid)
    here.move("ana", "suspend")
    with pytest.raises(AccountError, match="ana may do nothing: it is suspended"):
        here.of_user(USERS["ana"])
    here.move("ana", "remove")
    with pytest.raises(AccountError, match="has no account"):
        here.of_user(USERS["ana"])
    assert here.add("ana-2", USERS["ana"]) == here.of_user(USERS["ana"])


def test_a_life(here, record):
    person(here, "ana")
    with pytest.raises(AccountError, match="there is an account ana already"):
        here.add("ana", USERS["ben"])
    with pytest.raises(AccountError, match="user 60001 has the account ana"):
        here.add("ben", USERS["ana"])
    with pytest.raises(AccountError, match="owns this lab"):
        here.add("ben", os.geteuid())
    for event in ("resume", "remove"):
        with pytest.raises(AccountError, match="possible: suspend"):
            here.move("ana", event)
    assert here.move("ana", "suspend").state == "suspended"
    with pytest.raises(AccountError, match="possible: resume or remove"):
        here.move("ana", "suspend")
    assert here.move("ana", "resume").state == "active"
    here.move("ana", "suspend")
    assert here.move("ana", "remove").state == "removed"
    for event in ("suspend", "resume", "remove"):
        with pytest.raises(AccountError, match="nothing, this is final"):
            here.move("ana", event)
    with pytest.raises(AccountError, match="its name is not given again"):
        person(here, "ana")
    with pytest.raises(AccountError, match="removed, which is final"):
        here.set_limits("ana", Limits())
    found = [(kind, what.get("before"), what.get("after")) for kind, what in record]
    assert found == [
        ("account.add", None, None),
        ("account.suspend", "active", "suspended"),
        ("account.resume", "suspended", "active"),
        ("account.suspend", "active", "suspended"),
        ("account.remove", "suspended", "removed"),
    ]


def test_the_folders_owner_stays_what_it_is(here):
    for event in ("suspend", "resume", "remove"):
        with pytest.raises(AccountError, match="the folder belongs to it"):
            here.move("owner", event)
    here.set_limits("owner", Limits(3.0))
    assert here.find("owner").limits.share == 3.0


def test_a_change_that_cannot_be_recorded_is_not_made(here, tmp_path):
    person(here, "ana")
    before = here.listing()

    def full(kind, **what):
        raise OSError("no space left for the audit log")

    other = reopen(tmp_path / "federation", record=full)
    for change in (
        lambda: person(other, "ben"),
        lambda: other.move("ana", "suspend"),
        lambda: other.set_limits("ana", Limits(9.0)),
    ):
        with pytest.raises(OSError, match="audit log"):
            change()
    assert here.listing() == before


def test_limits_are_kept_and_checked(here):
    person(here, "ana")
    limits = Limits(0.5, 10**9)
    assert here.set_limits("ana", limits).limits == limits
    assert here.find("ana").limits == limits
    for share in (0, -1, float("nan"), float("inf"), 1001):
        with pytest.raises(AccountError, match="more than 0"):
            here.set_limits("ana", Limits(share))
    for quota in (-1, 2**63):
        with pytest.raises(AccountError, match="a quota has"):
            here.set_limits("ana", Limits(quota_bytes=quota))


def test_an_account_is_barred_once_its_quota_is_used_up_or_it_is_not_active(here):
    person(here, "ana")
    found = here.set_limits("ana", Limits(quota_bytes=100))
    assert accounts.why_barred(found, 99) == ""
    words = "ana: its quota of 100 bytes over the line is used up: get a larger one"
    assert accounts.why_barred(found, 100) == words
    words = "ana may do nothing: it is suspended"
    assert accounts.why_barred(here.move("ana", "suspend"), 0) == words
