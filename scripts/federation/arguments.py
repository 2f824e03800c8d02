"""The parts that the commands of `nebula` share: options, folder, numbers, tables."""

import argparse
import datetime
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from nebula_jax import errors, printable
from nebula_jax.communication import endpoints
from nebula_jax.federation import inner
from nebula_jax.security import accounts
from nebula_jax.security.audit import log as audit_log
from nebula_jax.security.membership import site_folder

DEFAULT_FOLDER = "federation"
REQUEST_SECONDS = 30.0  # for a rotation, the authority has to answer

Run = Callable[[argparse.Namespace], int]
Option = tuple[tuple[str, ...], dict[str, Any]]


class Command(NamedTuple):
    """A command of `nebula`."""

    name: str
    run: Run
    options: tuple[Option, ...]


COMMANDS: list[Command] = []  # all whose modules were imported


class InputError(errors.SettingsError):
    """An input that is missing or does not serve."""


def option(*names: str, **more: Any) -> Option:
    """Returns an argument of a command, as `ArgumentParser.add_argument` takes it."""
    return names, more


def file_option(name: str, what: str, metavar: str = "FILE") -> Option:
    """Returns an option that is a path."""
    return option(name, type=pathlib.Path, metavar=metavar, help=what)


def add_federation(parser: argparse.ArgumentParser, default: Any) -> None:
    """Adds the option that each command has, which may also come before it."""
    parser.add_argument(
        "--federation",
        type=pathlib.Path,
        default=default,
        metavar="FOLDER",
        help=f"folder of this lab (default: ./{DEFAULT_FOLDER})",
    )


def command(name: str, *options: Option) -> Callable[[Run], Run]:
    """Makes a command of a function, whose docstring says what the command does.

    `name` is such as `status`, or `account add` in a group; the function finds the
    values of `options` in a namespace, and returns the exit status.
    """

    def made(run: Run) -> Run:
        COMMANDS.append(Command(name, run, options))
        return run

    return made


def folder(arguments: argparse.Namespace) -> site_folder.Folder:
    """Returns the folder of this lab."""
    return site_folder.Folder(arguments.federation)


def again(arguments: argparse.Namespace, command: str) -> str:
    """Returns a command line to print, for the same folder."""
    place = arguments.federation
    more = "" if str(place) == DEFAULT_FOLDER else f" --federation={place}"
    return f"scripts/run nebula {command}{more}"


def record(place: site_folder.Folder, kind: str, /, **what: Any) -> None:
    """Puts an entry into this lab's audit log, on the disk.

    The switch, which has the log open, does it; without one this process does. `kind`
    and `what` are as for `audit_log.Log.append`; the owner of the lab does it. Raises
    errors.NebulaError if the entry is not there.
    """
    try:
        request(place, REQUEST_SECONDS, "record", kind=kind, what=what)
    except inner.NoSwitch:
        with audit_log.Log(place.audit, place.load().name) as log:
            log.append(kind, accounts.OWNER, **what)
            log.sign_head()  # so that peers can witness it


def people(arguments: argparse.Namespace) -> accounts.Accounts:
    """Returns this lab's accounts, which record changes; raises errors.NebulaError."""
    place = folder(arguments)
    place.load()
    return accounts.Accounts(place.path, functools.partial(record, place))


def request(
    place: site_folder.Folder, seconds: float, op: str, **fields: Any
) -> Mapping[str, Any]:
    """Returns the running switch's answer to a request of this user; see `inner.ask`.

    Raises errors.NebulaError if the switch does not run, does not answer or refuses.
    """
    place.load()
    try:
        return inner.ask(place, seconds, op, **fields)
    except OSError as error:
        raise inner.Refused(f"the switch does not answer: {error}") from None


def peer(text: str) -> tuple[str, tuple[str, int]]:
    """Returns lab and address of `lab-s=HOST:PORT`; raises SettingsError if none."""
    lab, _, address = text.partition("=")
    if not address:
        text = printable.line(text)
        raise InputError(f"peer={text}: expected LAB=HOST:PORT, such as lab-s={text}")
    site_folder.check_lab(lab)
    return lab, endpoints.host_and_port("peer", address)


def count(text: str) -> int:
    """Returns a number of rows or bytes as a person types it, such as 1e6.

    Raises InputError if it is no whole number; how large it may be, others check.
    """
    try:
        found = float(text)
        if found == int(found):
            return int(found)
    except (ValueError, OverflowError):
        pass
    raise InputError(
        f"{printable.line(repr(text))} is no whole number, as in 1000000 or 1e6"
    )


def day(text: str) -> float:
    """Returns when a day, or a minute of it, begins in UTC, in unix seconds.

    A grant until 2027-01-01 serves for the last time on the day before. Raises
    InputError if it is no such day.
    """
    try:
        found = datetime.datetime.fromisoformat(text)
        return found.replace(tzinfo=datetime.UTC).timestamp()
    except ValueError:
        raise InputError(
            f"{printable.line(repr(text))} is no day, as in 2027-01-01, nor minute"
            " (UTC), as in 2027-01-01T12:30"
        ) from None


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table whose columns are as wide as their longest value."""
    lines = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [each.ljust(width) for each, width in zip(line, widths, strict=True)]
        print("  ".join(cells).rstrip())
