"""Compares the examples of two clusters without showing ids or text.

Each side sends, for each of 1024 groups, the number of its ids and the XOR of their
digests; a digest is 64 bits of HMAC-SHA256(key, split and id), and its last 10 bits are
the group. If one side has an example more, the XOR of both sides' XORs of the group is
the digest of that example, so the side that has it finds its id and names it in the
error that ends both; the other side finds that it lacks one. (The idea is that of
invertible Bloom lookup tables; a few differences in 1024 groups hardly ever meet.)

The key keeps ids from a listener on the line. It keeps nothing from the peer, who has
it too and can try ids that it can guess: an id must not contain anything of its text.

N examples, G groups.
"""

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from nebula_jax import errors, printable

GROUPS = 1024  # 24 KiB of hexadecimal digits in a Hello, which may have 64 KiB
SHOWN = 3  # so many ids are named; the others are counted

_COUNT = np.dtype(">u4")
_DIGEST = np.dtype(">u8")
_KEY_CHECK = b"the same key?"

Ids = Mapping[str, Sequence[str]]  # split -> ids of its examples, each once, any order


class AlignmentError(errors.NebulaError):
    """A peer's fingerprint that is malformed."""


class _Groups(NamedTuple):
    """The examples by group: counts [G] int64, and XOR of digests [G] uint64."""

    counts: np.ndarray
    xors: np.ndarray


def default_key(*values: str) -> bytes:
    """Makes a key of settings that both sides have: no more secret than they are."""
    return hashlib.sha256(repr(values).encode()).digest()


def fingerprint(ids: Ids, key: bytes) -> dict[str, Any]:
    """Computes what a side sends of its examples, of all splits that both sides hold.

    These are JSON values: `key`, by which different keys differ from different
    examples; `splits`, the number of examples of each; `counts` and `xors` of the
    groups, [G] big-endian 32-bit and 64-bit numbers in hexadecimal.
    """
    groups = _grouped(_digests(ids, key))
    return {
        "key": hmac.digest(key, _KEY_CHECK, "sha256")[:8].hex(),
        "splits": {split: len(names) for split, names in ids.items()},
        "counts": groups.counts.astype(_COUNT).tobytes().hex(),
        "xors": groups.xors.astype(_DIGEST).tobytes().hex(),
    }


def differences(ids: Ids, key: bytes, peer: Any) -> list[str]:
    """Lists how this side's examples differ from the peer's; empty if they agree.

    In sentences for a person. An example that only this side has is named by split and
    id, up to `SHOWN` of them; groups in which several differ are counted. `peer` may be
    anything: raises AlignmentError if it is no fingerprint.
    """
    local = fingerprint(ids, key)
    if peer == local:
        return []
    peer_groups = _parse(peer)
    if peer["key"] != local["key"]:
        return ["the two sides have different keys, so their ids cannot be compared"]
    digests = _digests(ids, key)
    groups = _grouped(digests)
    surplus = groups.counts - peer_groups.counts
    xors = groups.xors ^ peer_groups.xors
    extra: list[int] = []
    unclear = 0
    for group in np.flatnonzero((surplus != 0) | (xors != 0)):
        found: list[int] = []
        if surplus[group] == 1:  # then the XOR is the digest of that example
            found = np.flatnonzero(digests == xors[group])[:1].tolist()
        extra += found
        unclear += surplus[group] >= 0 and not found
    examples = [(split, name) for split, names in ids.items() for name in names]
    sizes = local["splits"], peer["splits"]
    named = [examples[index] for index in sorted(extra)]
    return _sentences(*sizes, named, -int(surplus[surplus < 0].sum()), unclear)


def _digests(ids: Ids, key: bytes) -> np.ndarray:
    """Computes [N] uint64, in the order of `ids`."""
    digests = (
        hmac.digest(key, f"{split}\t{name}".encode(), "sha256")[: _DIGEST.itemsize]
        for split, names in ids.items()
        for name in names
    )
    return np.frombuffer(b"".join(digests), _DIGEST).astype(np.uint64)


def _grouped(digests: np.ndarray) -> _Groups:
    groups = (digests % GROUPS).astype(np.int64)
    xors = np.zeros(GROUPS, np.uint64)
    np.bitwise_xor.at(xors, groups, digests)
    return _Groups(np.bincount(groups, minlength=GROUPS), xors)


def _parse(peer: Any) -> _Groups:
    """Checks a peer's fingerprint, all of it."""
    try:
        counts = np.frombuffer(bytes.fromhex(peer["counts"]), _COUNT).astype(np.int64)
        xors = np.frombuffer(bytes.fromhex(peer["xors"]), _DIGEST).astype(np.uint64)
        fits = counts.shape == xors.shape == (GROUPS,)
        fits = fits and sum(peer["splits"].values()) == counts.sum()
        fits = fits and isinstance(peer["key"], str)
    except (AttributeError, KeyError, TypeError, ValueError):
        fits = False
    if not fits:
        raise AlignmentError("the peer's fingerprint of its examples is malformed")
    return _Groups(counts, xors)


def _sentences(
    local: Mapping[str, int],
    peer: Mapping[str, int],
    extra: Sequence[tuple[str, str]],
    lacking: int,
    unclear: int,
) -> list[str]:
    sentences = [
        f"{printable.line(split)} has {local.get(split, 0)} examples here and"
        f" {printable.line(peer.get(split, 0))} at the peer"
        for split in sorted({*local, *peer})
        if local.get(split, 0) != peer.get(split, 0)
    ][:SHOWN]
    for split, name in extra[:SHOWN]:
        sentences.append(f"example {name!r} of {split} is on this side only")
    if len(extra) > SHOWN:
        sentences.append(f"so are {len(extra) - SHOWN} others")
    if lacking:
        examples = "an example" if lacking == 1 else f"at least {lacking} examples"
        sentences.append(
            f"the peer has {examples} that this side lacks; its own message names the"
            " id"
        )
    if unclear:
        sentences.append(
            f"more ids differ, in {unclear} of {GROUPS} groups, than can be found"
        )
    return sentences
