"""The channels' names of sessions, kept over restarts of the switch.

A session's Welcome, which has the names, crosses once; its streams may come and go.
"""

import json
import pathlib

from nebula_jax import files
from nebula_jax.federation import meter

FILE = "sessions.json"


def read(folder: pathlib.Path) -> meter.Known:
    """Reads the names; those of a damaged file are lost, and sessions begin anew."""
    try:
        found = json.loads((folder / FILE).read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {
        session: sides
        for session, sides in found.items()
        if isinstance(sides, list) and len(sides) == 2 and all(map(_is_names, sides))
    }


def write(folder: pathlib.Path, known: meter.Known) -> None:
    """Writes the names."""
    with files.writing(folder / FILE) as partial:
        partial.write_text(json.dumps(known))


def _is_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)
