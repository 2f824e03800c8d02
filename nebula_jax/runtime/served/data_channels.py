"""The line between who reads data and the process that serves it.

    wanted   reader -> service   the numbers of rows, [N] int32
    parts    service -> reader   the parts of the corpus as JSON
    rows     service -> reader   the rows, [N, L] int32, ids packed as on M3's line

The rows of a corpus are numbered from 0, the parts one after the other. A request has
-1 where it has fewer numbers than N; a request without any is the last one. Who reads
more rows sends several requests at once.

N rows of a request, L tokens of a row, V pieces.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from nebula_jax import errors, printable, strict_json
from nebula_jax.communication import channels, codec, codecs
from nebula_jax.security import grants, names
from nebula_jax.security.membership import site_folder

CLUSTER = "data"  # serves; readers' names follow from what they are
NO_ROW = -1
MOST_REQUEST = 4096  # N
MOST_ROWS = 2**31 - 1  # of a corpus: their numbers are int32
PREFIX = "handle:"
_FLAG = re.compile(rf"{PREFIX}([^@]+)(?:@(.+))?")
_CLUSTER_SHOWN = 40  # characters
PAGE = jax.ShapeDtypeStruct((1 << 16,), np.uint8)  # room for 500 parts


class DataError(errors.NebulaError):
    """An error in data that is served, or in how it is served."""


class Wanted(NamedTuple):
    """The data that --data names."""

    handle: str
    lab: str  # that serves it; empty for whichever does


class Form(NamedTuple):
    """The form of what crosses."""

    rows: int  # N
    length: int  # L
    pieces: int  # V


class Ends(NamedTuple):
    """One side's ends of all channels: Senders and Receivers."""

    wanted: Any
    parts: Any
    rows: Any


class Part(NamedTuple):
    """A part of a corpus, such as the sentences of a language to train on."""

    name: str  # as in `mono/es`
    split: str
    key: str  # digest of all that it was made from
    rows: int


def parse(text: str) -> Wanted:
    """Reads the value of --data; raises errors.SettingsError if it names no data.

    >>> parse("handle:corpus-es@lab-s")
    Wanted(handle='corpus-es', lab='lab-s')
    """
    found = _FLAG.fullmatch(text)
    if found is None or not grants.is_name(found[1]):
        raise errors.SettingsError(
            f"data={text}: expected handle:NAME, or handle:NAME@LAB, as in"
            " handle:corpus-es"
        )
    wanted = Wanted(found[1], found[2] or "")
    if wanted.lab and not site_folder.is_lab(wanted.lab):
        raise errors.SettingsError(f"data={text}: {wanted.lab!r} is no lab's name")
    return wanted


def ends(carrier: channels.Carrier, form: Form, *, serves: bool) -> Ends:
    """Opens the ends of the service if `serves` is True, else those of a reader."""
    to_service = carrier.receiver if serves else carrier.sender
    to_reader = carrier.sender if serves else carrier.receiver
    plain = codec.identity()
    wanted = jax.ShapeDtypeStruct((form.rows,), np.int32)
    rows = jax.ShapeDtypeStruct((form.rows, form.length), np.int32)
    return Ends(
        to_service("wanted", wanted, plain),
        to_reader("parts", PAGE, plain),
        to_reader("rows", rows, codecs.pack_ids(form.pieces)),
    )


def settings(handle: str, vocabulary: str, max_length: int) -> dict[str, Any]:
    """Returns what a Hello of both sides has alike."""
    return {"data": handle, "vocabulary": vocabulary[:16], "max_length": max_length}


def job_of(handle: str) -> str:
    """Returns the job that serves a handle; raises grants.GrantError if none can."""
    grants.check_name(handle)
    return f"data-{handle}"


def reader_name(lab: str, job: str, cluster: str) -> str:
    """Returns the name as which a cluster reads, of which a federation has no two."""
    whole = json.dumps([lab, job, cluster]).encode()
    shown = names.label(cluster)[:_CLUSTER_SHOWN].rstrip("-")
    return f"{shown}:{hashlib.sha256(whole).hexdigest()[:16]}"


def described(parts: Sequence[Part]) -> np.ndarray:
    """Returns the PAGE of a corpus; raises DataError if it has too many parts."""
    text = json.dumps([list(part) for part in parts], separators=(",", ":")).encode()
    if len(text) > PAGE.size:
        raise DataError(f"a corpus of {len(parts)} parts is too much for one handle")
    return np.frombuffer(text.ljust(PAGE.size, b"\0"), np.uint8)


def read_description(page: np.ndarray) -> list[Part]:
    """Reads a peer's PAGE of a corpus; raises DataError if it is none."""
    try:
        found = strict_json.loads(page.tobytes().rstrip(b"\0"))
        is_sound = isinstance(found, list) and all(
            [type(value) for value in part] == [str, str, str, int]
            and part[-1] >= 0
            and all(printable.line(text, 256) == text for text in part[:3])
            for part in found
        )
    except (ValueError, TypeError):
        is_sound = False
    if not is_sound or sum(part[-1] for part in found) > MOST_ROWS:
        raise DataError("what serves the data describes it in a way that cannot be")
    return [Part(*part) for part in found]
