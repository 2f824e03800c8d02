"""The commands about people: login, logout, account."""

import argparse
import contextlib
import pathlib
import time

from nebula_jax import disk
from nebula_jax.security import accounts, private_files
from nebula_jax.security.accounts import (
    Account,
    account_token,
    isolation,
    logins,
    passwords,
    roles,
    tokens,
)
from nebula_jax.security.grants import budgets
from scripts.federation import arguments

NO_LIMIT = "none"


def add(commands: arguments.Commands) -> None:
    """Adds the commands."""
    made = arguments.command(
        commands,
        "login",
        login,
        "Log in: the next commands can have --account=NAME for a day.",
    )
    made.add_argument("name", help="name of the account")
    _add_password_file(made, "with the password (default: standard input)")
    made = arguments.command(
        commands, "logout", logout, "Log out: what a login has given does not serve."
    )
    made.add_argument("name", help="name of the account")
    inner = arguments.group(commands, "account", "Add, list and change accounts.")
    _add_account_commands(inner)


def _add_account_commands(commands: arguments.Commands) -> None:
    made = arguments.acting_command(
        commands, "add", account_add, "Add a person, with a first password."
    )
    made.add_argument("name", help="name of the account, such as ana")
    made.add_argument(
        "--role",
        choices=roles.ROLES,
        default=roles.RESEARCHER,
        help="what the account may do (default: researcher)",
    )
    _add_password_file(made, "with the first password (default: standard input)")
    arguments.acting_command(
        commands, "list", account_list, "List the accounts of this lab."
    )
    for name, what in (
        ("suspend", "Suspend an account: it may do nothing until it is resumed."),
        ("resume", "Resume an account that was suspended."),
        ("remove", "Remove an account for good; it has to be suspended before."),
    ):
        made = arguments.acting_command(commands, name, account_change, what)
        made.set_defaults(change=name)
        made.add_argument("name", help="name of the account")
    made = arguments.acting_command(
        commands, "role", account_role, "Give an account another role."
    )
    made.add_argument("name", help="name of the account")
    made.add_argument("role", choices=roles.ROLES, help="its role from now on")
    made = arguments.acting_command(
        commands,
        "password",
        account_password,
        "Set the password of an account: all its logins end.",
    )
    made.add_argument("name", help="name of the account")
    _add_password_file(made, "with the new password (default: standard input)")
    made.add_argument(
        "--old_password_file",
        type=pathlib.Path,
        metavar="FILE",
        help="with the present password, which only one's own account needs"
        " (default: standard input, before the new one)",
    )
    made = arguments.acting_command(
        commands, "limits", account_limits, "Set what an account has of this lab."
    )
    made.add_argument("name", help="name of the account")
    made.add_argument(
        "--share",
        type=float,
        metavar="WEIGHT",
        help="weight of its streams on a line that is full (others have 1)",
    )
    for name, what in (
        ("--line_bytes", "bytes over the line, in all"),
        ("--disk_bytes", "bytes in its work folder"),
    ):
        made.add_argument(
            name, metavar="BYTES", help=f"{what}, such as 1e9; {NO_LIMIT} for no limit"
        )


def _add_password_file(made: argparse.ArgumentParser, what: str) -> None:
    made.add_argument(
        "--password_file", type=pathlib.Path, metavar="FILE", help=f"file {what}"
    )


def login(given: argparse.Namespace) -> int:
    """Logs an account in."""
    with arguments.opened(given) as (folder, found):
        password = arguments.secret(f"password of {given.name}", given.password_file)
        made = logins.login(found, given.name, password, time.time())
        work = isolation.work_folder(folder.path, made.account)
        private_files.write(work / account_token.NAME, made.token + "\n")
    print(f"{made.account.name} is logged in until {budgets.date(made.expires)}")
    return 0


def logout(given: argparse.Namespace) -> int:
    """Logs an account out."""
    with arguments.opened(given) as (folder, found):
        token = account_token.read(folder, found.find(given.name).name)
        with contextlib.suppress(tokens.TokenError):  # whatever was in the file
            logins.logout(found, token)
        disk.remove(folder.user(given.name) / account_token.NAME)
        found.record("login", given.name, event="logged out")
    print(f"{given.name} is logged out")
    return 0


def account_add(given: argparse.Namespace) -> int:
    """Adds an account, and activates it."""
    accounts.check_name(given.name)
    with arguments.acting(given) as (folder, _, found, by, now):
        roles.require_over(by, "account.add", given.name, given.role)
        password = arguments.secret(
            f"first password of {given.name}", given.password_file, twice=True
        )
        passwords.new(password)  # else the account would be there without one
        if not _is_half_added(found.listing(), given.name, given.role):
            found.add(by, given.name, given.role, now)
        made = found.activate(by, given.name, password)
        isolation.work_folder(folder.path, made)
    print(f"{made.name} is a new account: {made.role}, {made.state}")
    print(f"next: nebula login {made.name}")
    return 0


def _is_half_added(there: list[Account], name: str, role: str) -> bool:
    """Returns True if a command was interrupted before the account was activated."""
    begun = (name, role, accounts.CREATED)
    return begun in [(each.name, each.role, each.state) for each in there]


def account_list(given: argparse.Namespace) -> int:
    """Lists the accounts."""
    with arguments.looking(given) as acting:
        roles.require(acting.by, "account.list")
        found = acting.identity.listing()
    arguments.print_table(
        ("account", "role", "state", "share", "over the line", "of", "on the disk"),
        [
            (
                *(each.name, each.role, each.state, f"{each.limits.share:g}"),
                f"{each.charged_bytes:,}",
                _limit(each.limits.quota_bytes),
                _limit(each.limits.disk_bytes),
            )
            for each in found
        ],
    )
    return 0


def account_change(given: argparse.Namespace) -> int:
    """Suspends, resumes or removes an account."""
    with arguments.acting(given) as acting:
        changes = {
            "suspend": acting.identity.suspend,
            "resume": acting.identity.resume,
            "remove": acting.identity.remove,
        }
        after = changes[given.change](acting.by, given.name)
    print(f"{after.name} is {after.state}")
    return 0


def account_role(given: argparse.Namespace) -> int:
    """Gives an account another role."""
    with arguments.acting(given) as acting:
        after = acting.identity.set_role(acting.by, given.name, given.role)
    print(f"{after.name} is {after.role} now")
    return 0


def account_password(given: argparse.Namespace) -> int:
    """Sets a password."""
    with arguments.acting(given) as (_, _, found, by, now):
        old = ""
        if by.name == given.name and _has_password(found, given.name):
            old = arguments.secret(
                f"present password of {given.name}", given.old_password_file
            )
        new = arguments.secret(
            f"new password of {given.name}", given.password_file, twice=True
        )
        logins.set_password(found, by, given.name, new, now, old)
    print(f"{given.name} has a new password; log in again")
    return 0


def _has_password(found: arguments.Identity, name: str) -> bool:
    query = "SELECT password IS NOT NULL FROM accounts WHERE name = ?"
    return any(row[0] for row in found.store.rows(query, (name,)))


def account_limits(given: argparse.Namespace) -> int:
    """Sets limits; what is not given stays."""
    with arguments.acting(given) as acting:
        before = acting.identity.find(given.name).limits
        limits = accounts.Limits(
            before.share if given.share is None else given.share,
            _quota(given.line_bytes, before.quota_bytes),
            _quota(given.disk_bytes, before.disk_bytes),
        )
        after = acting.identity.set_limits(acting.by, given.name, limits).limits
    print(
        f"{given.name} has a share of {after.share:g},"
        f" {_limit(after.quota_bytes)} bytes over the line,"
        f" {_limit(after.disk_bytes)} on the disk"
    )
    return 0


def _quota(text: str | None, before: int | None) -> int | None:
    if text is None:
        return before
    return None if text == NO_LIMIT else budgets.count(text)


def _limit(count: int | None) -> str:
    return "any" if count is None else f"{count:,}"
