"""Do two clusters hold the same examples? Found out without showing ids or text.

Only ids that one side lacks are named, in the error that ends both.

Each side says how many ids fall into each of 1024 groups, and the XOR of their digests
there; a digest is 64 bits of HMAC-SHA256(key, split and id), and its last 10 bits are
the group. Sides that agree say the same. Where one side has an example more, the XOR of
what both say of the group is the digest of that example, so that the side that has it
finds its id; the other side knows that it lacks one. (The idea is that of invertible
Bloom lookup tables; a few differences in 1024 groups hardly ever meet in one.)

The key keeps ids from a listener. It keeps nothing from the peer, who has it too and
can try what ids it can think of: an id must not tell what its text says.

N examples, G groups.
"""

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nebula_jax import errors

GROUPS = 1024
"""24 KiB of hexadecimal digits in a Hello, which may have 64 KiB."""
SHOWN = 3
"""So many ids are named; the rest is counted."""

_COUNT = np.dtype(">u4")
_DIGEST = np.dtype(">u8")
_KEY_CHECK = b"the same key?"

Ids = Mapping[str, Sequence[str]]
"""Split -> the ids of its examples, each once, in any order."""


class AgreementError(errors.NebulaError):
    """A peer's fingerprint that is none."""


def default_key(*known: str) -> bytes:
    """A key for two sides that were given none, from values that both know.

    It is as secret as they are: whoever knows the settings of the run has it.
    """
    return hashlib.sha256(repr(known).encode()).digest()


def fingerprint(ids: Ids, key: bytes) -> dict[str, Any]:
    """What a side says of its examples when clusters meet.

    Args:
      ids: of all splits that both sides hold.
      key: shared by the two sides.

    Returns:
      JSON values: `key`, by which different keys are told from different examples;
      `splits`, the number of examples of each; `counts` and `xors` of the groups, [G]
      big-endian 32-bit and 64-bit numbers in hexadecimal.
    """
    return _say(ids, key, _digests(ids, key))


def differences(ids: Ids, key: bytes, theirs: Any) -> list[str]:
    """What keeps this side's examples from being the peer's; empty if they agree.

    Args:
      ids: this side's.
      key: this side's.
      theirs: the peer's fingerprint, as it came.

    Returns:
      Sentences for a person. An example that only this side has is named by split and
      id, up to `SHOWN` of them.

    Raises:
      AgreementError: if `theirs` is no fingerprint.
    """
    digests = _digests(ids, key)
    mine = _say(ids, key, digests)
    if theirs == mine:
        return []
    their_counts, their_xors = _parse(theirs)
    if theirs["key"] != mine["key"]:
        return ["the two sides have different keys, so their ids cannot be compared"]

    more = _unhex(mine["counts"], _COUNT).astype(np.int64) - their_counts
    apart = _unhex(mine["xors"], _DIGEST) ^ their_xors
    groups = digests % GROUPS
    only_here, lacking, unclear = [], 0, 0
    for group in np.flatnonzero((more != 0) | (apart != 0)):
        members = np.flatnonzero(groups == group)
        found = _extra(digests[members], int(more[group]), apart[group])
        only_here += [int(index) for index in members[found]]
        lacking += max(0, -int(more[group]))
        unclear += more[group] >= 0 and not found
    return [
        *_counted(mine["splits"], theirs["splits"]),
        *_named(_names_at(ids, sorted(only_here))),
        *_lacking(lacking),
        *_unclear(unclear),
    ]


def _digests(ids: Ids, key: bytes) -> np.ndarray:
    """[N] uint64, in the order of `ids`."""
    digests = (
        hmac.digest(key, f"{split}\t{name}".encode(), "sha256")[: _DIGEST.itemsize]
        for split, names in ids.items()
        for name in names
    )
    return np.frombuffer(b"".join(digests), _DIGEST).astype(np.uint64)


def _say(ids: Ids, key: bytes, digests: np.ndarray) -> dict[str, Any]:
    groups = (digests % GROUPS).astype(np.int64)
    xors = np.zeros(GROUPS, np.uint64)
    np.bitwise_xor.at(xors, groups, digests)
    return {
        "key": hmac.digest(key, _KEY_CHECK, "sha256")[:8].hex(),
        "splits": {split: len(names) for split, names in ids.items()},
        "counts": np.bincount(groups, minlength=GROUPS).astype(_COUNT).tobytes().hex(),
        "xors": xors.astype(_DIGEST).tobytes().hex(),
    }


def _unhex(text: str, dtype: np.dtype) -> np.ndarray:
    return np.frombuffer(bytes.fromhex(text), dtype).astype(dtype.newbyteorder("="))


def _parse(theirs: Any) -> tuple[np.ndarray, np.ndarray]:
    """[G] int64 and [G] uint64 of a peer's fingerprint, which is checked whole."""
    try:
        counts = _unhex(theirs["counts"], _COUNT).astype(np.int64)
        xors = _unhex(theirs["xors"], _DIGEST)
        sizes = theirs["splits"].values()
        fits = counts.shape == xors.shape == (GROUPS,) and sum(sizes) == counts.sum()
        fits = fits and isinstance(theirs["key"], str)
    except (AttributeError, KeyError, TypeError, ValueError):
        fits = False
    if not fits:
        raise AgreementError("the peer's fingerprint of its examples is malformed")
    return counts, xors


def _extra(digests: np.ndarray, more: int, apart: np.uint64) -> list[int]:
    """Which one or two of a group's digests the peer lacks; empty if unclear."""
    if more == 1:
        return np.flatnonzero(digests == apart)[:1].tolist()
    if more == 2:
        place = {int(digest): index for index, digest in enumerate(digests)}
        for digest, index in place.items():
            other = place.get(digest ^ int(apart), index)
            if other != index:
                return [index, other]
    return []


def _names_at(ids: Ids, indices: Sequence[int]) -> list[str]:
    names = [(split, name) for split, those in ids.items() for name in those]
    return [f"{names[index][1]!r} of {names[index][0]}" for index in indices]


def _counted(mine: Mapping[str, int], theirs: Mapping[str, int]) -> list[str]:
    return [
        f"{split} has {mine.get(split, 0)} examples here and {theirs.get(split, 0)} at"
        " the peer"
        for split in sorted({*mine, *theirs})
        if mine.get(split, 0) != theirs.get(split, 0)
    ][:SHOWN]


def _named(names: Sequence[str]) -> list[str]:
    sentences = [f"example {name} is on this side only" for name in names[:SHOWN]]
    if len(names) > SHOWN:
        sentences.append(f"so are {len(names) - SHOWN} others")
    return sentences


def _lacking(count: int) -> list[str]:
    if not count:
        return []
    what = "an example" if count == 1 else f"at least {count} examples"
    return [f"the peer has {what} that this side lacks; its own message names the id"]


def _unclear(groups: int) -> list[str]:
    if not groups:
        return []
    return [f"more ids differ, in {groups} of {GROUPS} groups, than can be told apart"]
