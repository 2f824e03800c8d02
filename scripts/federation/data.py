"""The commands about data that others may read: data, grant, ungrant, grants."""

import argparse
import json
import pathlib
import time

from nebula_jax import printable
from nebula_jax.runtime.life import process
from nebula_jax.security import grants
from nebula_jax.security.accounts import roles
from nebula_jax.security.grants import Grant, budgets, data_access, data_requests
from nebula_jax.security.grants.data_requests import Request
from scripts.federation import arguments

KINDS = ("mono", "side")
ALL = ",".join(data_access.OPERATIONS)


DATA = arguments.option("name", help="name of the data")


def _operations_option(which: str) -> arguments.Option:
    return arguments.option(
        "--operations",
        default=ALL,
        metavar="NAMES",
        help=f"operations {which}, with commas between (default: {ALL})",
    )


@arguments.acting_command(
    "data add",
    arguments.option("name", help="name that others use, such as corpus-es"),
    arguments.option("path", type=pathlib.Path, help="folder of the text"),
    arguments.option(
        "--vocabulary",
        type=pathlib.Path,
        required=True,
        metavar="FILE",
        help="vocabulary, or folder of a tokenizer, whose ids are served",
    ),
    arguments.option(
        "--max_length",
        type=int,
        required=True,
        metavar="N",
        help="tokens of a row at most",
    ),
    arguments.option(
        "--kind",
        choices=KINDS,
        default=KINDS[0],
        help="text folder (mono, the default), or one side of a parallel corpus (side)",
    ),
    arguments.option("--about", default="", help="a line about it, for people"),
)
def data_add(given: argparse.Namespace) -> int:
    """Offers a corpus: others see its form, and no text."""
    data_access.check_handle(given.name)
    if given.max_length < 1:
        raise arguments.InputError(f"--max_length={given.max_length}: one at least")
    # No other command has to wait for these.
    from nebula_jax.runtime.served import data_service
    from scripts.federation import corpora

    with arguments.acting(given) as (_, _, found, by, now):
        roles.require(by, "data.register")
        access = data_access.DataAccess(found.store)
        if given.name in [each.name for each in access.handles()]:
            raise arguments.InputError(f"there is data {given.name} already")
        work = found.work_folder(by)
        with process.timed(f"reading {given.path}"):
            corpus = corpora.read(
                *(given.kind, given.path, given.vocabulary, given.max_length),
                *(given.about, work / data_service.PREPARED),
            )
        made = access.register(by, given.name, *corpus, now)
    print(
        f"{made.name} of {made.owner}: {made.schema.rows:,} rows; {made.schema.about}"
    )
    print(f"next: nebula grant SUBJECT {made.name} --rows 1e6 --until DAY")
    print(f"      nebula data serve {made.name}")
    return 0


@arguments.acting_command("data list")
def data_list(given: argparse.Namespace) -> int:
    """Lists the data of this lab."""
    with arguments.looking(given) as acting:
        found = data_access.DataAccess(acting.identity.store).handles()
    arguments.print_table(
        ("data", "owner", "state", "rows", "vocabulary", "about"),
        [
            (
                *(each.name, each.owner, each.state, f"{each.schema.rows:,}"),
                *(each.schema.vocabulary[:12], each.schema.about),
            )
            for each in found
        ],
    )
    return 0


@arguments.acting_command("data show", DATA)
def data_show(given: argparse.Namespace) -> int:
    """Shows the form of data, with invented rows."""
    with arguments.looking(given) as acting:
        access = data_access.DataAccess(acting.identity.store)
        found, mock = access.find(given.name), access.mock(given.name)
    print(f"{found.name} of {found.owner}, {found.state}; {found.schema.about}")
    print(f"rows: {found.schema.rows:,}")
    print(f"vocabulary: {found.schema.vocabulary or 'none'}")
    for column, kind in found.schema.columns.items():
        print(f"column {column}: {kind}")
    print("invented rows:")
    for row in mock:
        print(f"  {json.dumps(row, sort_keys=True)}")
    return 0


@arguments.acting_command("data withdraw", DATA)
def withdraw(given: argparse.Namespace) -> int:
    """Withdraws data for good: every use is refused."""
    with arguments.acting(given) as acting:
        access = data_access.DataAccess(acting.identity.store)
        access.withdraw(acting.by, given.name)
    print(f"{given.name} is withdrawn: every use of it is refused from now on")
    return 0


@arguments.acting_command(
    "data request",
    DATA,
    _operations_option("that are requested"),
    arguments.option("--why", default="", help="the reason, for the owner to read"),
)
def request(given: argparse.Namespace) -> int:
    """Requests the use of data from its owner."""
    with arguments.acting(given) as (_, _, found, by, now):
        kept = data_requests.Requests(found.store).keep(
            by.name, given.name, _operations(given), given.why, now
        )
        owner = data_access.DataAccess(found.store).find(given.name).owner
    print(f"request {kept.number} for {kept.handle} waits for {owner}")
    return 0


@arguments.acting_command(
    "data requests",
    arguments.option("--all", action="store_true", help="those decided as well"),
)
def list_requests(given: argparse.Namespace) -> int:
    """Lists the requests that are open, and whoever looks has made or may decide."""
    with arguments.looking(given) as acting:
        by, store = acting.by, acting.identity.store
        state = None if given.all else data_requests.REQUESTED
        own = {
            each.name
            for each in data_access.DataAccess(store).handles()
            if each.owner == by.name
        }
        found = [
            each
            for each in data_requests.Requests(store).listing(state)
            if arguments.may(by, "grant.list")
            or each.handle in own
            or each.subject == by.name
        ]
    arguments.print_table(
        ("request", "from", "data", "operations", "state", "why"),
        [_request_cells(each) for each in found],
    )
    return 0


def _request_cells(each: Request) -> tuple[str, ...]:
    operations = ", ".join(each.operations)
    why = printable.line(each.why)
    return (str(each.number), each.subject, each.handle, operations, each.state, why)


@arguments.acting_command(
    "data refuse", arguments.option("number", type=int, help="of the request")
)
def refuse(given: argparse.Namespace) -> int:
    """Refuses a request."""
    with arguments.acting(given) as acting:
        kept = data_requests.Requests(acting.identity.store)
        found = kept.refuse(acting.by, given.number)
    print(f"request {found.number} of {found.subject} is refused")
    return 0


@arguments.acting_command("data serve", DATA)
def serve(given: argparse.Namespace) -> int:
    """Serves data to those with a grant, until stopped."""
    from nebula_jax.runtime.served import data_service

    with arguments.looking(given) as acting:  # refused here, before anything begins
        access = data_access.DataAccess(acting.identity.store)
        access.provider(acting.by, given.name)
    return data_service.serve(
        arguments.folder(given), given.name, given.account, process.message
    )


@arguments.acting_command(
    "grant",
    arguments.option("subject", help="account here, as ana; elsewhere, as ana@lab-s"),
    arguments.option("handle", help="name of the data, such as corpus-es"),
    arguments.option("--rows", metavar="COUNT", help="rows at most, such as 1e6"),
    arguments.option("--bytes", metavar="COUNT", help="bytes at most, such as 2e9"),
    arguments.option(
        "--until", metavar="DAY", help="end (UTC), as 2027-01-01 or 2027-01-01T12:30"
    ),
    _operations_option("that are granted"),
)
def grant(given: argparse.Namespace) -> int:
    """Grants somebody the use of data, within bounds."""
    budget = budgets.Budget(
        None if given.rows is None else budgets.count(given.rows),
        None if given.bytes is None else budgets.count(given.bytes),
        None if given.until is None else budgets.time(given.until),
    )
    with arguments.acting(given) as (_, _, found, by, now):
        made = grants.Grants(found.store).give(
            by, given.subject, given.handle, _operations(given), budget, now
        )
    print(f"grant {made.number}: {made.subject} may use {made.handle}", end="")
    print(f" ({', '.join(made.operations)}), {_bounds(made)}")
    return 0


def _bounds(made: Grant) -> str:
    """Returns the bounds of a grant in words."""
    rows, nbytes, until = made.budget
    bounds = []
    if rows is not None:
        bounds.append(f"up to {rows:,} rows")
    if nbytes is not None:
        bounds.append(f"up to {nbytes:,} bytes")
    if until is not None:
        bounds.append(f"until {budgets.date(until)}")
    return ", ".join(bounds)


@arguments.acting_command(
    "ungrant",
    arguments.option("number", type=int, help="of the grant; nebula grants has it"),
)
def ungrant(given: argparse.Namespace) -> int:
    """Revokes a grant: its next use is refused."""
    with arguments.acting(given) as acting:
        access = grants.Grants(acting.identity.store)
        found = access.revoke(acting.by, given.number)
    print(f"grant {found.number} of {found.subject} for {found.handle} is revoked")
    return 0


@arguments.acting_command(
    "grants",
    arguments.option("--subject", help="only this one's, such as ana@lab-s"),
    arguments.option("--handle", help="only those for this data"),
)
def list_grants(given: argparse.Namespace) -> int:
    """Lists grants, and what is left of them: one's own, and those one may see."""
    with arguments.looking(given) as acting:
        by, store = acting.by, acting.identity.store
        own = {
            each.name
            for each in data_access.DataAccess(store).handles()
            if each.owner == by.name
        }
        found = [
            each
            for each in grants.Grants(store).listing(given.subject, given.handle)
            if arguments.may(by, "grant.list")
            or each.handle in own
            or each.subject == by.name
        ]
    arguments.print_table(
        (
            "grant",
            "to",
            "data",
            "operations",
            "rows left",
            "bytes left",
            "until",
            "is",
        ),
        [_grant_cells(each, time.time()) for each in found],
    )
    return 0


def _grant_cells(each: Grant, now: float) -> tuple[str, ...]:
    _, rows, nbytes, until = grants.left(each)
    return (
        *(str(each.number), each.subject, each.handle, ", ".join(each.operations)),
        *("any" if count is None else f"{count:,}" for count in (rows, nbytes)),
        "for ever" if until is None else budgets.date(until),
        grants.status(each, now),
    )


def _operations(given: argparse.Namespace) -> list[str]:
    return [each.strip() for each in given.operations.split(",")]
