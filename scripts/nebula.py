"""The command `nebula`: a federation of labs, its switches, people, data and audit.

    nebula init --name lab-s                       # the first lab, once
    nebula invite lab-t > invitation
    nebula switch --listen 0.0.0.0:7070

    nebula join lab-s.example:7070 --name lab-t    # another lab, once
    nebula switch --peer lab-s.example:7070

Then experiments take --federation=FOLDER. `nebula COMMAND --help` has the rest.
"""

import argparse
import sys
from collections.abc import Sequence

from nebula_jax.runtime.life import process
from scripts.federation import audits, data, doctor, founding, people, running

ROOMS = (founding, running, people, data, audits, doctor)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    made = argparse.ArgumentParser(
        prog="nebula",
        description="A federation of labs that train together over their switches.",
        epilog="Every command has --federation=FOLDER, by default ./federation.",
    )
    commands = made.add_subparsers(required=True, metavar="COMMAND", title="commands")
    for room in ROOMS:
        room.add(commands)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status."""
    arguments = parser().parse_args(argv)
    return process.guarded(lambda: arguments.run(arguments))


if __name__ == "__main__":
    sys.exit(main())
