"""The commands about people: account."""

import argparse
import pwd

from nebula_jax.federation import state
from nebula_jax.security import accounts, store
from scripts.federation import arguments

NO_LIMIT = "none"
NAME = arguments.option("name", help="name of the account")


@arguments.command(
    "account add",
    NAME,
    arguments.option(
        "--user", metavar="NAME", help="user of this host (default: of the same name)"
    ),
)
def account_add(given: argparse.Namespace) -> int:
    """Adds an account for a user of this host, who trains under it."""
    user = given.user or given.name
    try:
        uid = pwd.getpwnam(user).pw_uid
    except (KeyError, ValueError):
        raise arguments.InputError(
            f"user={user}: there is none on this host, whose administrator adds people"
        ) from None
    made = arguments.people(given).add(given.name, uid)
    print(f"{made.name} is a new account, of user {user} of this host: {made.state}")
    return 0


@arguments.command("account list")
def account_list(given: argparse.Namespace) -> int:
    """Lists the accounts of this lab."""
    found = arguments.people(given).listing()
    carried = store.Store(arguments.folder(given).carried, state.CARRIED)
    carried.create()  # as where no switch has run yet
    charged = carried.read()["charged"]
    arguments.print_table(
        ("account", "user", "state", "share", "over the line", "of"),
        [
            (
                each.name,
                "owner" if each.uid is None else str(each.uid),
                each.state,
                f"{each.limits.share:g}",
                f"{charged.get(each.name, 0):,}",
                _limit(each.limits.quota_bytes),
            )
            for each in found
        ],
    )
    return 0


@arguments.command("account suspend", NAME)
@arguments.command("account resume", NAME)
@arguments.command("account remove", NAME)
def account_change(given: argparse.Namespace) -> int:
    """Suspends an account, resumes it, or removes one for good that is suspended."""
    after = arguments.people(given).move(given.name, given.command)
    print(f"{after.name} is {after.state}")
    return 0


@arguments.command(
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
    people = arguments.people(given)
    before = people.find(given.name).limits
    limits = accounts.Limits(
        before.share if given.share is None else given.share,
        _quota(given.line_bytes, before.quota_bytes),
    )
    after = people.set_limits(given.name, limits).limits
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
