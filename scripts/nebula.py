"""The command `nebula`: a federation of labs, its switches, people, data and audit.

    nebula init --name lab-s                       # the first lab, once
    nebula invite lab-t --out invitation
    nebula switch --listen 0.0.0.0:7070

    nebula join lab-s.example:7070 --name lab-t    # another lab, once
    nebula switch --peer lab-s=lab-s.example:7070

Then experiments take --federation=FOLDER. `nebula COMMAND --help` has the rest.
"""

import argparse
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from nebula_jax import errors
from nebula_jax.runtime.life import process
from scripts.federation import (
    arguments,
    audits,
    data,
    doctor,
    founding,
    people,
    running,
)

ROOMS = (founding, running, people, data, audits, doctor)
GROUPS = {
    "account": "Adds, lists and changes accounts of users of this host.",
    "data": "Offers data to others.",
    "audit": "Reads the audit log, and checks that nobody changed it.",
}


def parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    made = argparse.ArgumentParser(
        prog="nebula",
        description="A federation of labs that train together over their switches.",
        epilog="Every command has --federation=FOLDER, by default ./federation."
        " `nebula experiments.pretrain_m3 ...` runs a module as `python -m` does;"
        " `nebula top RUN` shows a run, `nebula compare RUN RUN` several.",
    )
    arguments.add_federation(made, pathlib.Path(arguments.DEFAULT_FOLDER))
    places = {"": made.add_subparsers(required=True, metavar="COMMAND")}
    for room in ROOMS:
        for each in arguments.COMMANDS:
            if each.run.__module__ == room.__name__:
                _add(places, each)
    return made


def _add(places: dict[str, Any], command: arguments.Command) -> None:
    """Adds a command to its group, and before the first of a group the group itself."""
    group, _, name = command.name.rpartition(" ")
    if group not in places:
        inner = places[""].add_parser(group, **_help(GROUPS[group]))
        places[group] = inner.add_subparsers(required=True, metavar="COMMAND")
    made = places[group].add_parser(name, **_help(command.run.__doc__ or ""))
    made.set_defaults(run=command.run, command=name)
    arguments.add_federation(made, argparse.SUPPRESS)  # what came before it stays
    for names, more in command.options:
        made.add_argument(*names, **more)


def _help(text: str) -> dict[str, str]:
    what = text.partition("\n")[0]
    return {"help": what, "description": what}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status."""
    process.replace_unencodable()  # before --help, which may print
    given = parser().parse_args(argv)
    return process.guarded(lambda: _run(given))


def _run(given: argparse.Namespace) -> int:
    """Runs a command, whose errors name flags where the library names arguments."""
    try:
        return given.run(given)
    except errors.SettingsError as error:
        if str(error).partition("=")[0] in vars(
            given
        ):  # `listen=nowhere: expected ...`
            error.args = (f"--{error}",)
        raise


if __name__ == "__main__":
    sys.exit(main())
