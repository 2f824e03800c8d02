"""The entry point of a command: flags parsed, errors in one line, an exit status."""

import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import app, flags, logging

from nebula_jax import installed
from nebula_jax.commands import command_line
from nebula_jax.runtime.life import phases, process, programs


def run(
    main: Callable[[], int],
    defaults: Mapping[str, Any] | None = None,
    names: Sequence[str] = (),
) -> None:
    """Runs an entry point: parses its flags, prints errors as one line, exits.

    Args:
      defaults: of shared flags, in this command; those that cannot be end it.
      names: of the flags that the command has beside those that its file defines.
    """
    # What is imported stays: neither a collection nor Python's end looks through it
    # again, which took a quarter of a short run's CPU time.
    gc.freeze()
    phases.imported()
    programs.keep()
    for name, value in (defaults or {}).items():
        try:
            flags.FLAGS.set_default(name, value)
        except flags.Error as error:
            process.message(f"error: defaults={{{name!r}: {value!r}}}: {error}")
            sys.exit(2)
    for name in names:
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS[name])

    process.replace_unencodable()

    def parsed(argv: Sequence[str]) -> list[str]:
        wanted = {each.lstrip("-") for each in argv[1:] if each.startswith("-")}
        if wanted & {"help", "helpshort", "helpfull"}:
            about = sys.modules["__main__"].__doc__ or ""
            about = about.replace("python -m", installed.COMMAND)
            with process.for_people():  # `--help | head` reads a part of it
                print(command_line.help_text(about, full="helpfull" in wanted))
            process.drop_unread()
            sys.exit(0)
        try:
            rest = command_line.parse(argv)
            command_line.check_known()
            if "log_format" in flags.FLAGS:
                process.log_as(str(flags.FLAGS["log_format"].value))
            return rest
        except (flags.Error, UnicodeDecodeError) as error:
            text = str(error).removeprefix("ERROR:: ")  # absl's
            process.message("error: " + " ".join(text.split()))
            sys.exit(2)

    def guarded(argv: Sequence[str]) -> int:
        logging.set_verbosity(logging.WARNING)  # the libraries' chatter
        if len(argv) > 1:
            process.message(
                f"error: {argv[1]!r} is no flag; every argument is a --flag"
            )
            return 2
        status = process.guarded(lambda: command_line.with_flags(main))
        process.drop_unread()
        return status

    app.run(guarded, flags_parser=parsed)
