"""The arguments of any command: what holds for all of them, whatever they mean."""

import gc
import itertools
import math
import pathlib
import re
import sys
import textwrap
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from absl import app, flags, logging

from nebula_jax import errors, installed
from nebula_jax.runtime.life import memory, phases, process, programs

GROUPS = {  # groups of flags in --help, in their order: key -> title
    "command": "This command",
    "first": "To begin with",
    "run": "The run",
    "model": "The model",
    "data": "The data",
    "training": "The training",
    "line": "The line between clusters",
    "security": "Security",
    "expert": "For experts",
}
WIDTH, COLUMN = 88, 30  # columns of --help, and the first one of a description

SMALLER = {  # flags of what takes memory -> which of their values take less
    "batch_size": "a smaller",
    "eval_batch_size": "a smaller",
    "max_length": "a smaller",
    "length_buckets": "smaller",
    "micro_batches": "more",
    "max_in_flight": "fewer",
    "remat": "",
}
_NO_TEXT = ("Cc", "Cs", "Zl", "Zp")  # Unicode: controls, surrogates, line separators


def parse(argv: Sequence[str]) -> list[str]:
    """Parses flags, and checks what holds for all of them; returns what is no flag.

    Raises flags.Error if they cannot be parsed, a number is not finite, or an argument
    would not be one line of a file.
    """
    for argument in argv[1:]:
        # As a line of run.flags, it would be another flag, or none.
        if any(unicodedata.category(each) in _NO_TEXT for each in argument):
            raise flags.Error(
                f"{argument!a}: no argument may have line breaks or other control"
                " characters, or be anything but UTF-8"
            )
    rest = flags.FLAGS([argv[0], *_with_flagfiles(argv[1:])])
    for name in flags.FLAGS:
        value = flags.FLAGS[name].value
        # A NaN differs from itself: no run would be one with the same settings.
        if isinstance(value, float) and not math.isfinite(value):
            raise flags.IllegalFlagValueError(f"--{name}={value}: must be finite")
    return rest


def _with_flagfiles(given: Sequence[str]) -> Iterator[str]:
    """Yields arguments; a flagfile that is not there may be the package's."""
    folder = installed.FOLDER / "experiments" / "flags"
    arguments = iter(given)
    for argument in arguments:
        flag, equals, name = argument.partition("=")
        if flag not in ("-flagfile", "--flagfile"):
            yield argument
            continue
        path = pathlib.Path(name if equals else next(arguments, "")).expanduser()
        for each in (path, folder / path, installed.FOLDER / path):
            if each.is_file():
                yield f"--flagfile={each}"
                break
        else:
            known = ", ".join(sorted(each.name for each in folder.glob("*.flags")))
            raise flags.Error(f"--flagfile={path}: no such file; there are {known}")


def whole_number(text: str) -> int | None:
    """Returns the number that a part of a flag is; None if it is none.

    >>> whole_number("12"), whole_number("²"), whole_number("1" * 5000)
    (12, None, None)
    """
    return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else None


def workdir(given: str) -> pathlib.Path:
    """Returns the folder of --workdir, by default of the first flagfile's name."""
    if given:
        return pathlib.Path(given)
    name = sys.argv[0]
    for argument, value in itertools.pairwise([*sys.argv, ""]):
        flag, equals, inline = argument.lstrip("-").partition("=")
        if flag == "flagfile":  # the first: others may add a line to it
            name = inline if equals else value
            break
    return pathlib.Path("runs") / pathlib.Path(name).stem


def help_text(about: str, full: bool = False) -> str:
    """Returns the text of --help: flags by groups, experts' described if `full`."""
    grouped: dict[str, list[flags.Flag]] = {group: [] for group in GROUPS}
    for each in flags.FLAGS.get_key_flags_for_module(sys.argv[0]):
        # A flag without a setting is the command's own.
        known = getattr(each, "setting", None)
        grouped[known.group if known else "command"].append(each)
    parts = [about.strip(), "Flags, as --NAME=DEFAULT (--flagfile=FILE reads more)."]
    for group, found in grouped.items():
        title, lines = GROUPS[group], [line for each in found for line in _lines(each)]
        if group == "expert" and not full:
            title += " (--helpfull describes them)"
            names = " ".join(f"--{each.name}" for each in found)
            lines = textwrap.wrap(
                names, WIDTH, initial_indent="  ", subsequent_indent="  "
            )
        if found:
            parts.append("\n".join([f"{title}:", *lines]))
    return "\n\n".join(parts)


def _lines(flag: flags.Flag) -> list[str]:
    """Returns a flag's lines of --help: its name and default, and what it is."""
    default = flag.default
    shown = ",".join(default) if isinstance(default, list) else default
    name = f"  --[no]{flag.name}" if flag.boolean else f"  --{flag.name}="
    if not flag.boolean and shown not in (None, ""):
        name += f'"{shown}"' if " " in str(shown) else str(shown)
    text = f"{flag.help} On by default." if flag.boolean and default else flag.help
    about = [
        line
        for paragraph in text.splitlines()
        for line in textwrap.wrap(paragraph, WIDTH - COLUMN)
    ]
    # What is too long for its column has a line of its own.
    beside = [] if len(name) > COLUMN - 2 else [name.ljust(COLUMN) + about.pop(0)]
    return [*(beside or [name]), *(" " * COLUMN + line for line in about)]


_ARGUMENT = re.compile(
    r"(?<![\w.-])\w+(?==)"  # `fsdp=3 does not divide ...`
    r"|(?<=\()\w+(?=\))"  # `nobody came within 60 s (connect_timeout)`
    r"|(?<=another )\w+"  # `... name another workdir`
)
_IS_PATH = re.compile(r"(Text f|F)older|File|.*hf:ORG", re.DOTALL)
"""How the help of a flag begins whose value is a path, or a model that may be one."""
_SUBJECT = re.compile(r"^\w+(?=: | must | needs | is for )")
"""`delay must ...`: of settings alone; other errors begin with clusters or folders."""


def with_flags(main: Callable[[], int]) -> int:
    """Calls `main`, and names flags in errors where the library names arguments."""

    def flag(name: re.Match[str]) -> str:
        return f"--{name[0]}" if name[0] in flags.FLAGS else name[0]

    try:
        return main()
    except errors.NebulaError as error:
        text = _ARGUMENT.sub(flag, str(error))
        if isinstance(error, errors.SettingsError):
            text = _SUBJECT.sub(flag, text)
        for name in flags.FLAGS:  # a codec's error shows the place in its text
            if flags.FLAGS[name].present and f"\n  {flags.FLAGS[name].value}\n" in text:
                text = f"--{name}: {text}"
        error.args = (text,)
        for name, path in _paths():
            if re.match(rf"(\w+ )?{re.escape(path)}(?=[ :])", text):
                error.args = (f"--{name}={path}: {text}",)
                if not pathlib.Path(path).exists():  # then no other error is as bad
                    raise errors.SettingsError(*error.args) from None
        raise
    except OSError as error:
        for name, path in _paths():
            if str(error.filename) in map(str, (path, *pathlib.Path(path).parents)):
                text = f"--{name}={path}: {error.strerror}"
                raise errors.SettingsError(text) from None
        raise
    except (RuntimeError, MemoryError) as error:
        if found := memory.in_words(error):
            raise memory.OutOfMemory(f"{found}; {_smaller()}") from None
        raise


def _paths() -> Iterator[tuple[str, str]]:
    """Yields the flags that were given and are paths: name and value."""
    for name in flags.FLAGS:
        flag = flags.FLAGS[name]
        values = flag.value if isinstance(flag.value, list) else [flag.value]
        for value in map(str, values):
            is_path = "/" in value or _IS_PATH.match(flag.help)
            if flag.present and is_path and value not in ("", "."):
                yield name, value


def _smaller() -> str:
    """Returns what this command's flags could be, for it to take less memory."""
    known = flags.FLAGS.get_key_flags_for_module(sys.argv[0])
    values = {each.name: each.value for each in known}
    found = []
    for name, less in SMALLER.items():
        if name in values and not (name == "remat" and values[name]):
            value = values[name]
            now = ",".join(map(str, value)) if isinstance(value, list) else value
            found.append(f"{less} --{name} (now {now})".lstrip())
    return f"less is needed with {', '.join(found)}" if found else memory.REMEDY


def check_known() -> None:
    """Raises flags.Error at a flag that only other experiments have."""
    key = {each.name for each in flags.FLAGS.get_key_flags_for_module(sys.argv[0])}
    for module, defined in flags.FLAGS.flags_by_module_dict().items():
        if not module.startswith(("experiments.", "nebula_jax.", "scripts.")):
            continue
        for each in defined:
            if each.present and each.name not in key:
                raise flags.Error(f"Unknown command line flag '{each.name}'")


def run(
    main: Callable[[], int],
    defaults: Mapping[str, Any] | None = None,
    names: Sequence[str] = (),
) -> None:
    """Runs an entry point: parses its flags, prints errors as one line, exits.

    `defaults` are those of shared flags in this command; one that cannot be ends it.
    `names` are its flags beside those that its file defines.
    """
    # What is imported stays: to collect it took a quarter of a short run's CPU time.
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
                print(help_text(about, full="helpfull" in wanted))
            process.drop_unread()
            sys.exit(0)
        try:
            rest = parse(argv)
            check_known()
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
        status = process.guarded(lambda: with_flags(main))
        process.drop_unread()
        return status

    app.run(guarded, flags_parser=parsed)
