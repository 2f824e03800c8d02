"""Names, states, limits and roles of accounts; what is not permitted is denied."""

import contextlib
import doctest
import itertools

import pytest

from nebula_jax.security import accounts
from nebula_jax.security.accounts import Account, IdentityError, Limits, roles
from nebula_jax.security.accounts.roles import DeniedError

BAD_NAMES = [
    *("", ".", "..", "../etc", "/dev/zero", "a/b", "a\\b", "a.b", "a b", "a\n", "-a"),
    *("1a", "Ana", "änn", "ana\x00", "ana@lab-s", "a" * 33, "٣"),
    *("\ud800", "ana\u202e", "*", "~root", "ana;ls", "'--"),
]


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
        *[(bad, "owner") for bad in ("", "٣", "---", "..")],
    ],
)
def test_the_account_of_a_user_of_the_machine(user, name):
    assert accounts.name_for(user) == name


def test_the_life_of_an_account_is_one_table():
    states = ("active", "suspended", "removed")
    events = {event for _, event in accounts.TRANSITIONS}
    possible = {}
    for state, event in itertools.product(states, events):
        with contextlib.suppress(IdentityError):
            possible[state, event] = accounts.next_state("ana", state, event)
    assert possible == {
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
        *(Limits(quota_bytes=-1), Limits(quota_bytes=2**63)),
    ],
)
def test_limits_that_cannot_be(limits):
    with pytest.raises(IdentityError):
        accounts.check_limits(limits)


def test_limits():
    accounts.check_limits(Limits())
    accounts.check_limits(Limits(0.001, 2**50))


def test_a_lab_vouches_only_for_names_that_hold_no_lab():
    assert accounts.split_subject("ana@lab-s") == ("ana", "lab-s")
    assert accounts.split_subject("ana") == ("ana", "")
    for name, lab in [("ana@lab-t", "lab-s"), ("ana", "lab:0"), ("ana", "")]:
        with pytest.raises(IdentityError):
            accounts.vouched(name, lab)
    for subject in ("ana@", "@lab-s", "ana@lab-s@lab-t", "ana@Lab", "", "ana@..", "@"):
        with pytest.raises(IdentityError):
            accounts.split_subject(subject)


def account(role, name="ana", state="active"):
    return Account(name, role, state, Limits(), 0)


def permitted(role):
    found = set()
    for operation in roles.PERMITTED:
        with contextlib.suppress(DeniedError):
            roles.require(account(role), operation)
            found.add(operation)
    return found


def test_each_role():
    everything = set(roles.PERMITTED)
    assert permitted("owner") == everything
    reading = {"audit.show", "audit.verify", "account.list", "grant.list"}
    assert permitted("auditor") == reading
    running = {"job.run", "stream.open"}
    data = {"data.register", "data.serve", "grant.give"}
    assert permitted("researcher") == running | data | {"grant.revoke"}
    assert permitted("operator") == everything - data - {"account.role"}


def test_what_is_not_in_the_table_is_denied_to_all():
    for role in (*roles.ROLES, "root", ""):
        with pytest.raises(DeniedError, match="permitted: nobody"):
            roles.require(account(role), "disk.format")
    for operation in roles.PERMITTED:
        words = rf"ana \(king\) may not do {operation}; permitted: owner"
        with pytest.raises(DeniedError, match=words):
            roles.require(account("king"), operation)
        for state in ("suspended", "removed"):
            with pytest.raises(DeniedError, match=f"ana may do nothing: it is {state}"):
                roles.require(account("owner", state=state), operation)


def test_nobody_does_to_an_account_what_would_raise_its_own_role():
    over = [each for each in roles.PERMITTED if each.startswith("account.")]
    for mine, other, operation in itertools.product(roles.ROLES, roles.ROLES, over):
        try:
            roles.require_over(account(mine), operation, "ben", other)
        except DeniedError:
            assert mine != "owner"
        else:
            assert mine == "owner" or (mine, other) == ("operator", "researcher")
        # A role that is not the lab's whole owner does nothing to itself.
        if mine != "owner" or operation not in ("account.limits", "account.password"):
            with pytest.raises(DeniedError):
                roles.require_over(account(mine), operation, "ana", mine)
    with pytest.raises(DeniedError):
        roles.require_over(account("owner"), "account.add", "ben", "king")


def test_data_are_their_owners():
    researcher, operator = account("researcher"), account("operator", "ops")
    for operation in ("grant.give", "grant.revoke", "data.serve", "data.register"):
        roles.require_data(researcher, operation, "ana")
        roles.require_data(account("owner", "root"), operation, "ana")
        with pytest.raises(DeniedError, match=f"{operation} with data of ben"):
            roles.require_data(researcher, operation, "ben")
    roles.require_data(operator, "grant.revoke", "ana")  # in an emergency
    with pytest.raises(DeniedError):
        roles.require_data(operator, "grant.give", "ana")
