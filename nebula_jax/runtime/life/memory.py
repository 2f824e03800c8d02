"""Requests for more memory than there is, in words.

XLA raises one with a device's bytes, NumPy with an array's shape, Python with nothing;
each as an exception of its own that names no line of the program.
"""

import pathlib
import re
import sysconfig
import traceback

from nebula_jax import errors

REMEDY = (
    "fewer or shorter examples at a time need less, as do more micro-batches, and"
    " jax.checkpoint around layers"
)
"""For a loop of one's own; a command names its flags (`commands.command_line`)."""

_OF_XLA = re.compile("RESOURCE_EXHAUSTED|out of memory|OUT_OF_MEMORY", re.IGNORECASE)
_BYTES = re.compile(r"([0-9]{4,}) bytes")
_UNITS = re.compile(r"[0-9.]+ ?[KMGTPE]i?B")
_LIBRARIES = sysconfig.get_paths()["purelib"], sysconfig.get_paths()["stdlib"]


class OutOfMemory(errors.NebulaError):
    """A request for more memory than there is."""


def in_words(error: BaseException) -> str:
    """Returns the memory that a caught error asked for, and where; empty if none."""
    text = str(error)
    # RuntimeError: JaxRuntimeError is one, and JAX is not imported for it.
    is_of_xla = isinstance(error, RuntimeError) and _OF_XLA.search(text)
    if not (is_of_xla or isinstance(error, MemoryError)):
        return ""
    if found := _BYTES.search(text):
        asked = f"{int(found[1]) / 1e9:,.1f} GB were asked for"
    elif found := _UNITS.search(text):
        asked = f"{found[0]} were asked for"
    else:
        asked = "more was asked for than there is"
    if shape := re.search(r"an array with .*", text):  # NumPy's
        asked += f", for {shape[0]}"
    return f"out of memory: {asked}{_place(error)}"


def _place(error: BaseException) -> str:
    """Returns the innermost line of the program, not of a library, that failed."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((*_LIBRARIES, "<")):
            where = "/".join(pathlib.Path(frame.filename).parts[-3:])
            return f", by {frame.name} ({where}:{frame.lineno}: {frame.line})"
    return ""
