"""The table of roles: what is not in it is denied."""

import contextlib
import itertools

import pytest

from nebula_jax.security import accounts
from nebula_jax.security.accounts import Account, IdentityError, Limits, roles
from nebula_jax.security.accounts.roles import DeniedError


def account(role, name="ana", state="active"):
    return Account(name, role, state, Limits(), 0, 0.0)


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
    data = {"data.register", "data.request", "data.serve", "grant.give"}
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
    with pytest.raises(IdentityError, match="'king' is no role: those are owner"):
        roles.check("king")


@pytest.mark.parametrize("state", ["created", "suspended", "removed"])
def test_only_an_active_account_may_do_anything(state):
    for operation in roles.PERMITTED:
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


def test_the_roles_are_those_of_the_store_and_each_state_too():
    from nebula_jax.security.accounts import identity_store

    for each in (*roles.ROLES, accounts.CREATED, accounts.ACTIVE, accounts.REMOVED):
        assert f"'{each}'" in identity_store.MIGRATIONS[0]
