"""Seals: the encryption and the MACs of frames between two trainers.

TLS between clusters ends at each switch. So that a switch can drop or delay what it
carries and no more, trainers have keys that no switch has: they make a TLS connection
through the switches, exchange fresh secrets inside it, and end it; the keys of every
frame after that come of the secrets of both, both certificates and both incarnations.

A frame is two messages of AES-256-GCM (NIST SP 800-38D): its payload, encrypted, and
its head, in clear as associated data with the payload's tag among it. So a switch reads
which kind of frame passes, on which channel and how long it is, and counts that. Nonces
are the number of the frame on this connection and direction, whose key serves for
nothing else: a frame that was altered, repeated, left out, moved or made up has a wrong
tag.
"""

import hashlib
import hmac
import secrets
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from cryptography import exceptions
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers import (
    AEADDecryptionContext,
    Cipher,
    algorithms,
    modes,
)
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from nebula_jax import errors

KEY_BYTES, SECRET_BYTES = 32, 32
MAGIC = b"NEBS"  # the first bytes of a sealed frame
TAG_BYTES = 16
_PAYLOAD, _HEAD = 0, 1  # the parts of a frame
_NONCE = struct.Struct("!IQ")  # part of the frame, number of the frame
_PIECE_BYTES = 1 << 18  # that are encrypted at a time
CLUSTER_BYTES, JOB_BYTES = 64, 128
_OFFER = struct.Struct(f"!8s{SECRET_BYTES}sQ{CLUSTER_BYTES}s{JOB_BYTES}s")
_VERSION = b"NEBSEAL2"
OFFER_BYTES = _OFFER.size


class SealError(errors.NebulaError):
    """An offer of keys that cannot be read, or must not be taken."""


class Offer(NamedTuple):
    """One side's part of the keys."""

    secret: bytes  # 32 fresh random bytes
    incarnation: int  # see `incarnations`
    cluster: str  # the side's, such as `generator:0`
    job: str  # that both take part in

    def encode(self) -> bytes:
        """Returns its OFFER_BYTES bytes, which only the peer may see."""
        cluster, job = self.cluster.encode(), self.job.encode()
        if len(cluster) > CLUSTER_BYTES or len(job) > JOB_BYTES:
            raise SealError(f"the name {self.cluster} or {self.job} is too long")
        return _OFFER.pack(_VERSION, self.secret, self.incarnation, cluster, job)


def offer(incarnation: int, cluster: str, job: str) -> Offer:
    """Makes an offer for one connection."""
    return Offer(secrets.token_bytes(SECRET_BYTES), incarnation, cluster, job)


def read_offer(data: bytes) -> Offer:
    """Reads a peer's offer; raises SealError if it is of another version or damaged."""
    version, secret, incarnation, *names = _OFFER.unpack(data)
    if version != _VERSION:
        raise SealError(f"the peer offers keys as {version!r}; here it is {_VERSION!r}")
    try:
        cluster, job = (each.rstrip(b"\0").decode("ascii") for each in names)
    except UnicodeDecodeError:
        raise SealError("the peer's names cannot be read") from None
    return Offer(secret, incarnation, cluster, job)


class Side(NamedTuple):
    """The part that one side has brought into the keys."""

    offer: Offer
    certificate: bytes  # DER


def seals(connector: Side, listener: Side) -> tuple["Seal", "Seal"]:
    """Returns the seals of a connection, from the connector and from the listener."""
    made_of = b"".join(each.offer.encode() for each in (connector, listener))
    salt = b"".join(
        hashlib.sha256(each.certificate).digest() for each in (connector, listener)
    )
    keys = HKDF(hashes.SHA256(), 2 * KEY_BYTES, salt, _VERSION).derive(made_of)
    return Seal(keys[:KEY_BYTES]), Seal(keys[KEY_BYTES:])


class Seal:
    """The encryption and the MACs of the frames of one direction of one connection."""

    magic, tag_bytes, what, is_sealed = MAGIC, TAG_BYTES, "MAC", True

    def __init__(self, key: bytes) -> None:
        """Starts with a key of 32 bytes, of this direction of this connection alone."""
        self._key, self._frame = algorithms.AES(key), 0
        self._decryptor: AEADDecryptionContext | None = None  # of the present payload
        self._scratch = bytearray()

    def next_frame(self) -> None:
        """Goes on to the next frame."""
        self._frame += 1
        self._decryptor = None

    def head_tag(self, data: bytes) -> bytes:
        """Returns the MAC of the present frame's head."""
        return self._mac(_HEAD, (data,))

    def protect(
        self, payload: Sequence[Any], in_clear: bool
    ) -> tuple[Sequence[Any], bytes]:
        """Returns the present frame's payload as one encrypted buffer, and its MAC.

        Args:
          payload: buffers of bytes, which stay as they are.
          in_clear: True to leave it as it is.
        """
        if in_clear or not payload:
            return payload, self._mac(_PAYLOAD, payload)
        made = self._cipher(_PAYLOAD).encryptor()
        sealed = np.empty(sum(map(len, payload)), np.uint8).data
        end = 0
        for piece in _pieces(payload):
            end += made.update_into(piece, sealed[end:])
        made.finalize()
        return (sealed,), made.tag

    def reveal(self, buffer: Any) -> None:
        """Decrypts the payload's next part in place, unverified until `is_whole`."""
        if self._decryptor is None:
            self._decryptor = self._cipher(_PAYLOAD).decryptor()
            self._scratch = self._scratch or bytearray(_PIECE_BYTES)
        for piece in _pieces((buffer,)):
            count = self._decryptor.update_into(piece, self._scratch)
            piece[:] = memoryview(self._scratch)[:count]

    def is_whole(self, payload: Sequence[Any], tag: bytes, in_clear: bool) -> bool:
        """Returns True if the present frame's payload has this MAC.

        Args:
          payload: buffers of bytes, all of them revealed unless `in_clear`.
          in_clear: as it was protected.
        """
        if in_clear or self._decryptor is None:
            return hmac.compare_digest(self._mac(_PAYLOAD, payload), tag)
        try:
            self._decryptor.finalize_with_tag(tag)
        except exceptions.InvalidTag:
            return False
        return True

    def _mac(self, part: int, buffers: Sequence[Any]) -> bytes:
        """Returns the MAC of a part that is not encrypted, as if it were one buffer."""
        made = self._cipher(part).encryptor()
        for buffer in buffers:
            made.authenticate_additional_data(buffer)
        made.finalize()
        return made.tag

    def _cipher(self, part: int) -> Cipher[modes.GCM]:
        nonce = _NONCE.pack(part, self._frame)
        return Cipher(self._key, modes.GCM(nonce))


def _pieces(buffers: Sequence[Any]) -> Iterator[memoryview]:
    """Yields buffers in pieces: between two of them other threads have their turn."""
    for buffer in buffers:
        view = memoryview(buffer)
        for start in range(0, len(view), _PIECE_BYTES):
            yield view[start : start + _PIECE_BYTES]
