"""Seals: MACs of the frames between two trainers, whoever carries them.

TLS between clusters ends at each switch. So that a switch can drop or delay what it
carries and no more, trainers have keys that no switch has: they make a TLS connection
through the switches, exchange fresh secrets inside it, and end it; the keys of every
frame after that come of the secrets of both, both certificates and both incarnations.

A tag is GMAC (AES-256-GCM without a plaintext, NIST SP 800-38D) over a part of a frame.
Its nonce is the number of the frame on this connection and direction, whose key serves
for nothing else: a frame that was altered, repeated, left out, moved or made up has a
wrong tag.
"""

import hashlib
import hmac
import secrets
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from nebula_jax import errors

KEY_BYTES, SECRET_BYTES = 32, 32
MAGIC = b"NEBS"
"""The first bytes of a sealed frame."""
TAG_BYTES = 16
_NONCE = struct.Struct("!IQ")  # part of the frame, number of the frame
CLUSTER_BYTES, JOB_BYTES = 64, 128
_OFFER = struct.Struct(f"!8s{SECRET_BYTES}sQ{CLUSTER_BYTES}s{JOB_BYTES}s")
_VERSION = b"NEBSEAL1"
OFFER_BYTES = _OFFER.size


class SealError(errors.NebulaError):
    """An offer of keys that cannot be read, or must not be taken."""


class Offer(NamedTuple):
    """One side's part of the keys."""

    secret: bytes
    """32 fresh random bytes."""
    incarnation: int
    """The number of starts of the side's process, see `incarnations`."""
    cluster: str
    """The side's, such as `generator:0`."""
    job: str
    """The job that both take part in."""

    def encode(self) -> bytes:
        """Returns its OFFER_BYTES bytes, which only the peer may see."""
        cluster, job = self.cluster.encode(), self.job.encode()
        if len(cluster) > CLUSTER_BYTES or len(job) > JOB_BYTES:
            raise SealError(f"the name {self.cluster} or {self.job} is too long")
        return _OFFER.pack(_VERSION, self.secret, self.incarnation, cluster, job)


def offer(incarnation: int, cluster: str, job: str) -> Offer:
    """Makes an offer for one connection.

    Args:
      incarnation: of this process.
      cluster: this side's.
      job: that both take part in.
    """
    return Offer(secrets.token_bytes(SECRET_BYTES), incarnation, cluster, job)


def read_offer(data: bytes) -> Offer:
    """Reads a peer's offer.

    Raises:
      SealError: if it is of another version, or its names cannot be read.
    """
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
    certificate: bytes
    """DER."""


def macs(connector: Side, listener: Side) -> tuple["Mac", "Mac"]:
    """Returns the MACs of a connection, from the connector and from the listener."""
    made_of = b"".join(each.offer.encode() for each in (connector, listener))
    salt = b"".join(
        hashlib.sha256(each.certificate).digest() for each in (connector, listener)
    )
    keys = HKDF(hashes.SHA256(), 2 * KEY_BYTES, salt, _VERSION).derive(made_of)
    return Mac(keys[:KEY_BYTES]), Mac(keys[KEY_BYTES:])


class Mac:
    """The MACs of the frames of one direction of one connection."""

    magic, tag_bytes, what = MAGIC, TAG_BYTES, "MAC"

    def __init__(self, key: bytes) -> None:
        """Starts before the first frame.

        Args:
          key: 32 bytes, of this direction of this connection alone.
        """
        self._key, self._frame = algorithms.AES(key), 0

    def next_frame(self) -> None:
        """Goes on to the next frame."""
        self._frame += 1

    def tag(self, part: int, buffers: Sequence[Any]) -> bytes:
        """Returns the MAC of buffers, as if they were one.

        Args:
          part: of the present frame; each has one tag.
          buffers: of bytes.
        """
        nonce = _NONCE.pack(part, self._frame)
        made = Cipher(self._key, modes.GCM(nonce)).encryptor()
        for buffer in buffers:
            made.authenticate_additional_data(buffer)
        made.finalize()
        return made.tag

    def fits(self, part: int, buffers: Sequence[Any], tag: bytes) -> bool:
        """Returns True if a tag is the MAC of buffers; takes equally long if not."""
        return hmac.compare_digest(self.tag(part, buffers), tag)
