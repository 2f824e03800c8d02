"""The line between who reads data and the process that serves it.

    proof    reader -> service   of the reader's account, see `accounts.tokens`
    wanted   reader -> service   an operation, and what of it, [1 + N] int32
    parts    service -> reader   the parts of the corpus as JSON, in pages
    rows     service -> reader   the rows, [N, L] int32, ids packed as on M3's line
    lengths  service -> reader   the tokens of each row of a side, in pages
    ids      service -> reader   the ids of the rows of a side, a line each, in pages

The rows of a corpus are numbered from 0, the parts one after the other. A request for
rows has their numbers, then -1 where it has fewer than N; a request without any is the
last one. Who reads more rows sends several at once. A request for `lengths` or `ids`
has the number of a page.

N rows of a request, L tokens of a row, V pieces.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from nebula_jax import errors, printable
from nebula_jax.communication import channels, codec, codecs
from nebula_jax.security import names
from nebula_jax.security.accounts import tokens
from nebula_jax.security.grants import data_access
from nebula_jax.security.membership import site_folder

CLUSTER = "data"
"""The name of the process that serves; those of readers follow from what they are."""
NO_ROW = -1
MOST_REQUEST = 4096  # N
MOST_ROWS = 2**31 - 1  # of a corpus: their numbers are int32
PAGE_BYTES = 4096
MOST_PAGES = 1 << 18  # of a gigabyte
ROWS, LENGTHS, IDS = range(3)
"""The operations of a request."""
GRANTED = {ROWS: "rows", LENGTHS: "lengths", IDS: "rows"}
"""Operation -> what a grant has to permit: an id is a column of a row."""
MOST_PARTS_PAGES = 64
SIDE = "side"
"""The name of the parts of a side of a parallel corpus: one for each split."""
PREFIX = "handle:"
_FLAG = re.compile(rf"{PREFIX}([^@]+)(?:@(.+))?")
_JOB = "data-"
_MOST_JOB = 64 - len(_JOB)  # characters that a job's name leaves for a handle's
_CLUSTER_SHOWN = 40  # characters
PAGE = jax.ShapeDtypeStruct((PAGE_BYTES,), np.uint8)


class DataError(errors.NebulaError):
    """An error in data that is served, or in how it is served."""


class Wanted(NamedTuple):
    """The data that --data names."""

    handle: str
    lab: str
    """That serves it; empty for whichever does."""


class Form(NamedTuple):
    """The form of what crosses."""

    rows: int  # N
    length: int  # L
    pieces: int  # V


class Ends(NamedTuple):
    """One side's ends of all channels: Senders and Receivers."""

    proof: Any
    wanted: Any
    parts: Any
    rows: Any
    lengths: Any
    ids: Any


class Part(NamedTuple):
    """A part of a corpus, such as the sentences of a language to train on."""

    name: str
    """As in `mono/es`."""
    split: str
    key: str
    """Digest of all that it was made from."""
    rows: int
    id_bytes: int = 0
    """Bytes of the ids of its rows, an end of line after each; 0 if they have none."""


def parse(text: str) -> Wanted:
    """Reads the value of --data.

    >>> parse("handle:corpus-es@lab-s")
    Wanted(handle='corpus-es', lab='lab-s')

    Raises:
      errors.SettingsError: if it names no data.
    """
    found = _FLAG.fullmatch(text)
    if found is None or not data_access.is_handle(found[1]):
        raise errors.SettingsError(
            f"data={text}: expected handle:NAME, or handle:NAME@LAB, as in"
            " handle:corpus-es"
        )
    wanted = Wanted(found[1], found[2] or "")
    if wanted.lab and not site_folder.is_lab(wanted.lab):
        raise errors.SettingsError(f"data={text}: {wanted.lab!r} is no lab's name")
    return wanted


def reader_ends(carrier: channels.Carrier, form: Form) -> Ends:
    """Opens a reader's ends."""
    plain, packed = codec.identity(), codecs.pack_ids(form.pieces)
    proof, wanted, rows = _specs(form)
    return Ends(
        carrier.sender("proof", proof, plain),
        carrier.sender("wanted", wanted, plain),
        carrier.receiver("parts", PAGE, plain),
        carrier.receiver("rows", rows, packed),
        carrier.receiver("lengths", PAGE, plain),
        carrier.receiver("ids", PAGE, plain),
    )


def service_ends(carrier: channels.Carrier, form: Form) -> Ends:
    """Opens the service's ends."""
    plain, packed = codec.identity(), codecs.pack_ids(form.pieces)
    proof, wanted, rows = _specs(form)
    return Ends(
        carrier.receiver("proof", proof, plain),
        carrier.receiver("wanted", wanted, plain),
        carrier.sender("parts", PAGE, plain),
        carrier.sender("rows", rows, packed),
        carrier.sender("lengths", PAGE, plain),
        carrier.sender("ids", PAGE, plain),
    )


def _specs(form: Form) -> tuple[codec.Spec, ...]:
    return (
        jax.ShapeDtypeStruct((tokens.PROOF_BYTES,), np.uint8),
        jax.ShapeDtypeStruct((1 + form.rows,), np.int32),
        jax.ShapeDtypeStruct((form.rows, form.length), np.int32),
    )


def settings(handle: str, vocabulary: str, max_length: int) -> dict[str, Any]:
    """Returns what a Hello of both sides has alike.

    Args:
      handle: its name.
      vocabulary: digest.
      max_length: L.
    """
    return {
        "data": handle,
        "vocabulary": vocabulary[:16],
        "max_length": max_length,
    }


def job_of(handle: str) -> str:
    """Returns the job as which a handle is served.

    Raises:
      DataError: if its name is too long for one.
    """
    data_access.check_handle(handle)
    if len(handle) > _MOST_JOB:
        raise DataError(
            f"{handle}: a handle that is served has up to {_MOST_JOB} characters"
        )
    return _JOB + handle


def reader_name(lab: str, account: str, job: str, cluster: str) -> str:
    """Returns the name as which a cluster reads.

    No two of a federation have one, and who checks it finds whether it is a lab's own.

    Args:
      lab: of the cluster.
      account: that reads.
      job: that it takes part in.
      cluster: its name there.
    """
    whole = json.dumps([lab, account, job, cluster]).encode()
    shown = names.label(cluster)[:_CLUSTER_SHOWN].rstrip("-")
    return f"{shown}:{hashlib.sha256(whole).hexdigest()[:16]}"


def pages(values: np.ndarray) -> list[np.ndarray]:
    """Returns the bytes of an array in pages, one at least; zeros fill the last."""
    data = values.view(np.uint8)
    count = max(1, -(-len(data) // PAGE_BYTES))
    whole = np.zeros(count * PAGE_BYTES, np.uint8)
    whole[: len(data)] = data
    return list(whole.reshape(count, PAGE_BYTES))


def pages_of(parts: Sequence[Part]) -> list[np.ndarray]:
    """Returns the description of a corpus in pages; a zero ends the last.

    Raises:
      DataError: if it has too many parts.
    """
    text = json.dumps([list(part) for part in parts], separators=(",", ":")).encode()
    made = pages(np.frombuffer(text + b"\0", np.uint8))
    if len(made) > MOST_PARTS_PAGES:
        raise DataError(f"a corpus of {len(parts)} parts is too much for one handle")
    return made


def is_last_page(page: np.ndarray) -> bool:
    """Returns True if a description ends on a page."""
    return not page[-1]


def read_pages(pages: Sequence[np.ndarray]) -> list[Part]:
    """Reads the description of a corpus, as a peer has sent it.

    Raises:
      DataError: if it is none.
    """
    data = b"".join(page.tobytes() for page in pages).rstrip(b"\0")
    try:
        described = json.loads(data)
        found = [Part(*fields) for fields in described]
        types = (str, str, str, int, int)
        is_sound = isinstance(described, list) and all(
            [type(value) for value in part] == list(types)
            and part.rows >= 0
            and 0 <= part.id_bytes <= MOST_PAGES * PAGE_BYTES
            and all(printable.line(text, 256) == text for text in part[:3])
            for part in found
        )
    except (ValueError, TypeError, RecursionError):
        is_sound = False
    if not is_sound or sum(part.rows for part in found) > MOST_ROWS:
        raise DataError("what serves the data describes it in a way that cannot be")
    return found
