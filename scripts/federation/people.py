"""The commands about people: login, logout, account."""

import argparse
import contextlib
import time

from nebula_jax import disk
from nebula_jax.security import accounts, grants, private_files
from nebula_jax.security.accounts import logins, roles, tokens
from scripts.federation import arguments

NO_LIMIT = "none"


NAME = arguments.option("name", help="name of the account")


@arguments.command(
    "login",
    NAME,
    arguments.file_option(
        "--password_file", "file with the password (default: standard input)"
    ),
)
def login(given: argparse.Namespace) -> int:
    """Logs in: the next commands can have --account=NAME for a day."""
    with arguments.opened(given) as (_, found):
        password = arguments.secret(f"password of {given.name}", given.password_file)
        made = logins.login(found, given.name, password, time.time())
        work = found.work_folder(made.account)
        private_files.write(work / tokens.NAME, made.token + "\n")
    print(f"{made.account.name} is logged in until {grants.date(made.expires)}")
    return 0


@arguments.command("logout", NAME)
def logout(given: argparse.Namespace) -> int:
    """Logs out: what a login has given does not serve."""
    with arguments.opened(given) as (folder, found):
        token = tokens.read(folder, found.find(given.name).name)
        with contextlib.suppress(tokens.TokenError):  # whatever was in the file
            logins.logout(found, token)
        disk.remove(folder.user(given.name) / tokens.NAME)
        found.store.record("login", given.name, event="logged out")
    print(f"{given.name} is logged out")
    return 0


@arguments.acting_command(
    "account add",
    NAME,
    arguments.option(
        "--role",
        choices=roles.ROLES,
        default=roles.RESEARCHER,
        help="what the account may do (default: researcher)",
    ),
    arguments.file_option(
        "--password_file", "file with the first password (default: standard input)"
    ),
)
def account_add(given: argparse.Namespace) -> int:
    """Adds a person, with a first password."""
    accounts.check_name(given.name)
    with arguments.acting(given) as (_, _, found, by, _):
        roles.require_over(by, "account.add", given.name, given.role)
        password = arguments.secret(
            f"first password of {given.name}", given.password_file, twice=True
        )
        made = logins.add(found, by, given.name, given.role, password)
        found.work_folder(made)
    print(f"{made.name} is a new account: {made.role}, {made.state}")
    print(f"next: nebula login {made.name}")
    return 0


@arguments.acting_command("account list")
def account_list(given: argparse.Namespace) -> int:
    """Lists the accounts of this lab."""
    with arguments.looking(given) as acting:
        roles.require(acting.by, "account.list")
        found = acting.identity.listing()
    arguments.print_table(
        ("account", "role", "state", "share", "over the line", "of"),
        [
            (
                *(each.name, each.role, each.state, f"{each.limits.share:g}"),
                f"{each.charged_bytes:,}",
                _limit(each.limits.quota_bytes),
            )
            for each in found
        ],
    )
    return 0


@arguments.acting_command("account suspend", NAME)
@arguments.acting_command("account resume", NAME)
@arguments.acting_command("account remove", NAME)
def account_change(given: argparse.Namespace) -> int:
    """Suspends an account, resumes it, or removes one for good that is suspended."""
    with arguments.acting(given) as acting:
        after = acting.identity.move(acting.by, given.name, given.command)
    print(f"{after.name} is {after.state}")
    return 0


@arguments.acting_command(
    "account role",
    NAME,
    arguments.option("role", choices=roles.ROLES, help="its role from now on"),
)
def account_role(given: argparse.Namespace) -> int:
    """Gives an account another role."""
    with arguments.acting(given) as acting:
        after = acting.identity.set_role(acting.by, given.name, given.role)
    print(f"{after.name} is {after.role} now")
    return 0


@arguments.acting_command(
    "account password",
    NAME,
    arguments.file_option(
        "--password_file", "file with the new password (default: standard input)"
    ),
    arguments.file_option(
        "--old_password_file",
        "with the present password, which only one's own account needs (default:"
        " standard input, before the new one)",
    ),
)
def account_password(given: argparse.Namespace) -> int:
    """Sets the password of an account: all its logins end."""
    with arguments.acting(given) as (_, _, found, by, now):
        old = ""
        if by.name == given.name and logins.has_password(found, given.name):
            old = arguments.secret(
                f"present password of {given.name}", given.old_password_file
            )
        new = arguments.secret(
            f"new password of {given.name}", given.password_file, twice=True
        )
        logins.set_password(found, by, given.name, new, now, old)
    print(f"{given.name} has a new password; log in again")
    return 0


@arguments.acting_command(
    "account limits",
    NAME,
    arguments.option(
        "--share",
        type=float,
        metavar="WEIGHT",
        help="weight of its streams on a line that is full (others have 1)",
    ),
    arguments.option(
        "--line_bytes",
        metavar="BYTES",
        help=f"bytes over the line, in all, such as 1e9; {NO_LIMIT} for no limit",
    ),
)
def account_limits(given: argparse.Namespace) -> int:
    """Sets what an account has of this lab; what is not given stays."""
    with arguments.acting(given) as acting:
        before = acting.identity.find(given.name).limits
        limits = accounts.Limits(
            before.share if given.share is None else given.share,
            _quota(given.line_bytes, before.quota_bytes),
        )
        after = acting.identity.set_limits(acting.by, given.name, limits).limits
    print(
        f"{given.name} has a share of {after.share:g},"
        f" {_limit(after.quota_bytes)} bytes over the line"
    )
    return 0


def _quota(text: str | None, before: int | None) -> int | None:
    if text is None:
        return before
    return None if text == NO_LIMIT else arguments.count(text)


def _limit(count: int | None) -> str:
    return "any" if count is None else f"{count:,}"
