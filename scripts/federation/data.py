"""The commands about data that others may read: data, grant, ungrant, grants."""

import argparse
import pathlib
import signal
import time
from collections.abc import Sequence

from nebula_jax.runtime.life import process
from nebula_jax.security import grants
from nebula_jax.security.grants import Grant
from scripts.federation import arguments

WHOSE = (
    arguments.option("subject", help="account here, as ana; elsewhere, as ana@lab-s"),
    arguments.option("handle", help="name of the data, such as corpus-es"),
)


@arguments.command(
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
)
def data_add(given: argparse.Namespace) -> int:
    """Offers a corpus: others see how large it is, and no text."""
    grants.check_name(given.name)
    if given.max_length < 1:
        raise arguments.InputError(f"--max_length={given.max_length}: one at least")
    # No other command has to wait for these.
    from nebula_jax.runtime.served import owner_text

    settings = {
        "text_folder": str(given.path.resolve()),
        "vocabulary": str(given.vocabulary.resolve()),
        "max_length": given.max_length,
    }
    access = _grants(given)
    if given.name in [each.name for each in access.handles()]:
        raise arguments.InputError(f"there is data {given.name} already")
    # All of it is read once: a line that does not serve is found now.
    with process.timed(f"reading {given.path}"):
        prepared = arguments.folder(given).prepared
        text = owner_text.opened(settings, prepared, process.message)
    about = ", ".join(dict.fromkeys(each.name for each in text.parts))
    made = access.register(given.name, settings, len(text), text.digest, about)
    print(f"{made.name}: {made.rows:,} rows; {made.about}")
    grant = f"grant SUBJECT {made.name} --rows 1e6 --until DAY"
    print(f"next: {arguments.again(given, grant)}")
    print(f"      {arguments.again(given, f'data serve {made.name}')}")
    return 0


@arguments.command("data list")
def data_list(given: argparse.Namespace) -> int:
    """Lists the data of this lab."""
    found = _grants(given).handles()
    arguments.print_table(
        ("data", "rows", "vocabulary", "about"),
        [
            (name, f"{rows:,}", vocabulary[:12], about)
            for name, rows, vocabulary, about in found
        ],
    )
    return 0


@arguments.command("data serve", arguments.option("name", help="name of the data"))
def serve(given: argparse.Namespace) -> int:
    """Serves data to those with a grant, until stopped."""
    from nebula_jax.runtime.served import data_service

    service = data_service.DataService(arguments.folder(given), given.name)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: service.stop())
    service.run()
    process.message(f"{given.name} is not served any more")
    return 0


@arguments.command(
    "grant",
    *WHOSE,
    arguments.option("--rows", metavar="COUNT", help="rows at most, such as 1e6"),
    arguments.option(
        "--until", metavar="DAY", help="end (UTC), as 2027-01-01 or 2027-01-01T12:30"
    ),
)
def grant(given: argparse.Namespace) -> int:
    """Grants somebody the use of data, within bounds."""
    made = Grant(
        given.subject,
        given.handle,
        None if given.rows is None else arguments.count(given.rows),
        None if given.until is None else arguments.day(given.until),
    )
    _grants(given).give(made, time.time())
    return _print_grants([made])


def _grants(given: argparse.Namespace) -> grants.Grants:
    return grants.Grants(arguments.people(given))


@arguments.command("ungrant", *WHOSE)
def ungrant(given: argparse.Namespace) -> int:
    """Revokes a grant: its next use is refused."""
    _grants(given).revoke(given.subject, given.handle)
    print(f"the grant of {given.subject} for {given.handle} is revoked")
    return 0


@arguments.command("grants")
def list_grants(given: argparse.Namespace) -> int:
    """Lists grants, and what is left of them."""
    return _print_grants(_grants(given).listing())


def _print_grants(found: Sequence[Grant]) -> int:
    arguments.print_table(
        ("to", "data", "rows left", "until", "is"),
        [
            (
                each.subject,
                each.handle,
                "any" if each.rows_left is None else f"{each.rows_left:,}",
                "for ever" if each.until is None else grants.date(each.until),
                each.status(time.time()),
            )
            for each in found
        ],
    )
    return 0
