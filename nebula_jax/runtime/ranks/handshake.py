"""The proof that two processes of one cluster have the run's secret.

    root                                                    process
    challenge            ------------------------------>
                         <------------------------------    claim: rank, purpose,
                                                            own challenge, proof
    proof                ------------------------------>

A proof is an HMAC-SHA256, by the secret, over its maker's role, the coordinator's
address as every process was given it, the rank and purpose of the process, and both
challenges, 32 fresh random bytes each. So each side knows that the other has the secret
now: a proof of another connection, role, rank, purpose or cluster is none here. Neither
says anything else before.

This is three-pass mutual authentication of ISO/IEC 9798-4: SKID3 in Menezes, van
Oorschot and Vanstone, Handbook of Applied Cryptography, section 10.3.2. It protects no
byte that follows, and no more from who can alter what others have on the line: the
collectives of the devices, in clear, cross the same network.
"""

import hmac
import json
import re
import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple

from nebula_jax import errors

RENDEZVOUS, SERVICE = "rendezvous", "service"
"""Purposes: to come to the others, and to reach JAX's coordination service."""
MOST_BYTES = 1 << 10
"""Of a message."""
REFUSED: Mapping[str, Any] = {"refused": "proof"}
"""The root's reply to who proves nothing."""

_ROOT, _PROCESS = "root", "process"


class Unproven(errors.NebulaError):
    """A peer that has not shown that it has the secret."""


class OtherSecret(Unproven):
    """A peer that finds that this side has not shown it: its secret is another."""


class Claim(NamedTuple):
    """The facts that both proofs of a connection are about."""

    address: str
    """The coordinator's, HOST:PORT."""
    rank: int
    purpose: str
    of_root: str
    """Its challenge."""
    of_process: str


def challenge() -> dict[str, Any]:
    """Returns the root's first message."""
    return {"challenge": secrets.token_hex(32)}


def claim(
    secret: bytes, address: str, rank: int, purpose: str, asked: Mapping[str, Any]
) -> tuple[Claim, dict[str, Any]]:
    """Answers the root's challenge, as another process.

    Args:
      secret: of the run.
      address: the coordinator's, HOST:PORT.
      rank: of this process.
      purpose: RENDEZVOUS or SERVICE.
      asked: the root's message.

    Returns:
      What is claimed, for `check_root`; and the message.

    Raises:
      Unproven: if the root's message is no challenge.
    """
    own = secrets.token_hex(32)
    claimed = Claim(address, rank, purpose, _random(asked), own)
    proof = _proof(secret, _PROCESS, claimed)
    message = {"rank": rank, "purpose": purpose, "challenge": own, "proof": proof}
    return claimed, message


def check_process(
    secret: bytes, address: str, asked: Mapping[str, Any], message: Mapping[str, Any]
) -> tuple[Claim, dict[str, Any]]:
    """Checks, as the root, what a process answers.

    Args:
      secret, address: as for `claim`.
      asked: this root's own message, of the same connection.
      message: the answer.

    Returns:
      What is proven, and the reply.

    Raises:
      Unproven: if the peer does not have the secret.
    """
    rank, purpose = message.get("rank"), message.get("purpose")
    if type(rank) is not int or not isinstance(purpose, str):
        raise Unproven("a claim without a rank and a purpose")
    claimed = Claim(address, rank, purpose, _random(asked), _random(message))
    _check(secret, _PROCESS, claimed, message)
    return claimed, {"proof": _proof(secret, _ROOT, claimed)}


def check_root(secret: bytes, claimed: Claim, reply: Mapping[str, Any]) -> None:
    """Checks, as another process, what the root replies.

    Raises:
      OtherSecret: if the root says that this process has proven nothing.
      Unproven: if the peer does not have the secret.
    """
    if reply == REFUSED:
        raise OtherSecret("the root has another secret, or another coordinator address")
    _check(secret, _ROOT, claimed, reply)


def _random(message: Mapping[str, Any]) -> str:
    found = message.get("challenge")
    if not isinstance(found, str) or not re.fullmatch("[0-9a-f]{64}", found):
        raise Unproven("no challenge of 32 bytes")
    return found


def _proof(secret: bytes, role: str, claimed: Claim) -> str:
    said = json.dumps(["nebula cluster 1", role, *claimed])
    return hmac.digest(secret, said.encode(), "sha256").hex()


def _check(
    secret: bytes, role: str, claimed: Claim, message: Mapping[str, Any]
) -> None:
    shown = str(message.get("proof")).encode("utf-8", "replace")
    if not hmac.compare_digest(_proof(secret, role, claimed).encode(), shown):
        raise Unproven(f"no proof of a {role} of this cluster")
