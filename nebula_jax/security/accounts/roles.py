"""Roles and what they may do: one table, in which nothing stands for a no.

An owner runs a lab. An operator keeps it going and has no access to data. A researcher
trains, and decides about the data that it registered. An auditor reads, and changes
nothing.
"""

from collections.abc import Mapping

from nebula_jax import errors
from nebula_jax.security import accounts

OWNER, OPERATOR, RESEARCHER, AUDITOR = "owner", "operator", "researcher", "auditor"
ROLES = (OWNER, OPERATOR, RESEARCHER, AUDITOR)

PERMITTED: Mapping[str, frozenset[str]] = {
    "account.add": frozenset({OWNER, OPERATOR}),
    "account.limits": frozenset({OWNER, OPERATOR}),
    "account.list": frozenset({OWNER, OPERATOR, AUDITOR}),
    "account.password": frozenset({OWNER, OPERATOR}),
    "account.remove": frozenset({OWNER, OPERATOR}),
    "account.role": frozenset({OWNER}),
    "account.suspend": frozenset({OWNER, OPERATOR}),
    "audit.show": frozenset({OWNER, OPERATOR, AUDITOR}),
    "audit.verify": frozenset({OWNER, OPERATOR, AUDITOR}),
    "certificate.invite": frozenset({OWNER, OPERATOR}),
    "certificate.revoke": frozenset({OWNER, OPERATOR}),
    "certificate.rotate": frozenset({OWNER, OPERATOR}),
    "data.register": frozenset({OWNER, RESEARCHER}),
    "data.serve": frozenset({OWNER, RESEARCHER}),
    "grant.give": frozenset({OWNER, RESEARCHER}),
    "grant.list": frozenset({OWNER, OPERATOR, AUDITOR}),
    "grant.revoke": frozenset({OWNER, OPERATOR, RESEARCHER}),
    "job.run": frozenset({OWNER, OPERATOR, RESEARCHER}),
    "stream.open": frozenset({OWNER, OPERATOR, RESEARCHER}),
    "switch.run": frozenset({OWNER, OPERATOR}),
}
"""Operation -> the roles that may do it."""

GIVES: Mapping[str, frozenset[str]] = {
    OWNER: frozenset(ROLES),
    OPERATOR: frozenset({RESEARCHER}),
}
"""Role -> the roles of the accounts that it may add and change. Who sets the password
of an account can act as it: an operator that could do so with an operator's or an
owner's would have raised its own role."""

EVERYBODYS: Mapping[str, frozenset[str]] = {
    "data.register": frozenset({OWNER}),
    "data.serve": frozenset({OWNER}),
    "grant.give": frozenset({OWNER}),
    "grant.revoke": frozenset({OWNER, OPERATOR}),
}
"""Operation -> the roles that may do it with everybody's data; others, with their own.
An operator ends a grant in an emergency, and can give none."""

_ON_ONESELF = frozenset({"account.limits", "account.password"})


class DeniedError(errors.NebulaError):
    """An operation that an account may not do."""


def require_active(account: accounts.Account) -> None:
    """Checks that an account may do anything at all.

    Raises:
      DeniedError: if it is not active.
    """
    if account.state != accounts.ACTIVE:
        raise DeniedError(f"{account.name} may do nothing: it is {account.state}")


def require(account: accounts.Account, operation: str) -> None:
    """Checks that an account may do something.

    Args:
      account: as it is at present.
      operation: a key of PERMITTED; any other is denied to all.

    Raises:
      DeniedError: if it may not; names the account and the operation.
    """
    require_active(account)
    permitted = PERMITTED.get(operation, frozenset())
    if account.role not in permitted:
        others = ", ".join(role for role in ROLES if role in permitted) or "nobody"
        raise DeniedError(
            f"{account.name} ({account.role}) may not do {operation}; permitted:"
            f" {others}"
        )


def require_over(
    account: accounts.Account, operation: str, name: str, role: str
) -> None:
    """Checks that an account may do something to an account, its own or another.

    Nobody changes their own role or state: so nobody can raise it.

    Args:
      account: that acts, as it is at present.
      operation: a key of PERMITTED.
      name: of the account that it is done to.
      role: that this account has, or gets.

    Raises:
      DeniedError: if it may not.
    """
    require(account, operation)
    if name == account.name:
        if account.role == OWNER and operation in _ON_ONESELF:
            return
        raise DeniedError(f"{name} may not do {operation} to itself: another has to")
    if role not in GIVES.get(account.role, frozenset()):
        raise DeniedError(
            f"{account.name} ({account.role}) may not do {operation} to {name}: an"
            f" account with the role {role}"
        )


def require_data(account: accounts.Account, operation: str, owner: str) -> None:
    """Checks that an account may do something with the data of an account.

    Args:
      account: that acts, as it is at present.
      operation: a key of PERMITTED.
      owner: the name of the account that registered the data.

    Raises:
      DeniedError: if it may not.
    """
    require(account, operation)
    everybodys = EVERYBODYS.get(operation, frozenset())
    if account.name != owner and account.role not in everybodys:
        raise DeniedError(
            f"{account.name} ({account.role}) may not do {operation} with data of"
            f" {owner}; permitted: {owner}, {', '.join(sorted(everybodys)) or 'nobody'}"
        )
