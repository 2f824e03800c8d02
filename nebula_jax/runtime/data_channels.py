"""The line between who reads data and the process that serves it.

    proof    reader -> service   of the reader's account, see `token_proof`
    wanted   reader -> service   numbers of rows, [N] int32, then -1 where fewer
    parts    service -> reader   the parts of the corpus as JSON, in pages of bytes
    rows     service -> reader   the rows, [N, L] int32, ids packed as on M3's line

The rows of a corpus are numbered from 0, the parts one after the other. A request with
no number is the last. Who reads more than N rows sends several requests at once.

N rows of a request, L tokens of a row, V pieces.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from nebula_jax import errors, printable
from nebula_jax.communication import channels, codec, codecs
from nebula_jax.security import data_access, names, token_proof

CLUSTER = "data"
"""The name of the process that serves; those of readers follow from what they are."""
NO_ROW = -1
MOST_REQUEST = 4096  # N
MOST_ROWS = 2**31 - 1  # of a corpus: their numbers are int32
PAGE_BYTES = 4096
MOST_PAGES = 64
_JOB = "data-"
_MOST_JOB = 64 - len(_JOB)  # characters that a job's name leaves for a handle's
_CLUSTER_SHOWN = 40  # characters


class DataError(errors.NebulaError):
    """Data that cannot be served, or that was served otherwise than it should be."""


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


class Part(NamedTuple):
    """A part of a corpus, such as the sentences of a language to train on."""

    name: str
    """As in `mono/es`."""
    split: str
    key: str
    """Digest of all that it was made from."""
    rows: int


def reader_ends(carrier: channels.Carrier, form: Form) -> Ends:
    """Opens a reader's ends."""
    proof, wanted, parts, rows = _specs(form)
    plain, packed = codec.identity(), codecs.pack_ids(form.pieces)
    return Ends(
        carrier.sender("proof", proof, plain),
        carrier.sender("wanted", wanted, plain),
        carrier.receiver("parts", parts, plain),
        carrier.receiver("rows", rows, packed),
    )


def service_ends(carrier: channels.Carrier, form: Form) -> Ends:
    """Opens the service's ends."""
    proof, wanted, parts, rows = _specs(form)
    plain, packed = codec.identity(), codecs.pack_ids(form.pieces)
    return Ends(
        carrier.receiver("proof", proof, plain),
        carrier.receiver("wanted", wanted, plain),
        carrier.sender("parts", parts, plain),
        carrier.sender("rows", rows, packed),
    )


def _specs(form: Form) -> tuple[codec.Spec, ...]:
    return (
        jax.ShapeDtypeStruct((token_proof.PROOF_BYTES,), np.uint8),
        jax.ShapeDtypeStruct((form.rows,), np.int32),
        jax.ShapeDtypeStruct((PAGE_BYTES,), np.uint8),
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
        "--max_length": max_length,
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


def pages_of(parts: Sequence[Part]) -> list[np.ndarray]:
    """Returns the description of a corpus in pages of bytes; zeros fill the last.

    Raises:
      DataError: if it has too many parts.
    """
    text = json.dumps([list(part) for part in parts], separators=(",", ":")).encode()
    count = len(text) // PAGE_BYTES + 1  # a zero ends it
    if count > MOST_PAGES:
        raise DataError(f"a corpus of {len(parts)} parts is too much for one handle")
    whole = np.zeros(count * PAGE_BYTES, np.uint8)
    whole[: len(text)] = np.frombuffer(text, np.uint8)
    return list(whole.reshape(count, PAGE_BYTES))


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
        found = [Part(*fields) for fields in json.loads(data)]
        types = (str, str, str, int)
        is_sound = all(
            [type(value) for value in part] == list(types)
            and part.rows >= 0
            and all(printable.line(text, 256) == text for text in part[:3])
            for part in found
        )
    except (ValueError, TypeError, RecursionError):
        is_sound = False
    if not is_sound or sum(part.rows for part in found) > MOST_ROWS:
        raise DataError("what serves the data describes it in a way that cannot be")
    return found
