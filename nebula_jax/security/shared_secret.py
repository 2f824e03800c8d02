"""The proof that two processes have a secret in common: of a run, or of a switch.

    listener                                                caller
    challenge            ------------------------------>
                         <------------------------------    claim: number, purpose,
                                                            own challenge, proof
    proof                ------------------------------>

A proof is an HMAC-SHA256, by the secret, over its maker's role, the listener's address
as both were given it, the number and purpose of the caller, and both challenges, 32
fresh random bytes each. So each side knows that the other has the secret now: a proof
of another connection, role, number, purpose or address is none here. Neither says
anything else before.

This is three-pass mutual authentication of ISO/IEC 9798-4: SKID3 in Menezes, van
Oorschot and Vanstone, Handbook of Applied Cryptography, section 10.3.2. It hides and
protects no byte that follows from who is on the line between both: between hosts, that
has to be a network of their own.
"""

import hmac
import json
import re
import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple

from nebula_jax import errors

RENDEZVOUS, SERVICE = "rendezvous", "service"
"""Purposes in a cluster: to meet the others, and to reach JAX's service."""
MOST_BYTES = 1 << 10  # of a message
REFUSED: Mapping[str, Any] = {"refused": "proof"}  # reply to who proves nothing

_LISTENER, _CALLER = "listener", "caller"


class Unproven(errors.NebulaError):
    """A peer that has not shown that it has the secret."""


class OtherSecret(Unproven):
    """A peer that finds that this side has not shown it: its secret is another."""


class Claim(NamedTuple):
    """The facts that both proofs of a connection are about."""

    address: str  # the listener's, HOST:PORT
    number: int  # the caller's: in a cluster its rank
    purpose: str
    of_listener: str  # its challenge
    of_caller: str


def challenge() -> dict[str, Any]:
    """Returns the listener's first message."""
    return {"challenge": secrets.token_hex(32)}


def claim(
    secret: bytes, address: str, number: int, purpose: str, asked: Mapping[str, Any]
) -> tuple[Claim, dict[str, Any]]:
    """Answers the listener's challenge, as a caller.

    `secret` is random, of 32 characters or more; `address` the listener's, HOST:PORT;
    `number` this process's, such as its rank. Returns the claim, for `check_listener`,
    and the message. Raises Unproven if the listener's message is no challenge.
    """
    own = secrets.token_hex(32)
    claimed = Claim(address, number, purpose, _random(asked), own)
    proof = _proof(secret, _CALLER, claimed)
    message = {"number": number, "purpose": purpose, "challenge": own, "proof": proof}
    return claimed, message


def check_caller(
    secret: bytes, address: str, asked: Mapping[str, Any], message: Mapping[str, Any]
) -> tuple[Claim, dict[str, Any]]:
    """Checks a caller's answer, as the listener; returns what is proven and the reply.

    `asked` is this side's own message, of the same connection; for `secret` and
    `address` see `claim`. Raises Unproven if the peer does not have the secret.
    """
    number, purpose = message.get("number"), message.get("purpose")
    if type(number) is not int or not isinstance(purpose, str):
        raise Unproven("a claim without a number and a purpose")
    claimed = Claim(address, number, purpose, _random(asked), _random(message))
    _check(secret, _CALLER, claimed, message)
    return claimed, {"proof": _proof(secret, _LISTENER, claimed)}


def check_listener(secret: bytes, claimed: Claim, reply: Mapping[str, Any]) -> None:
    """Checks, as the caller, what the listener replies.

    Raises OtherSecret if it says that this process has proven nothing, Unproven if it
    does not have the secret.
    """
    if reply == REFUSED:
        raise OtherSecret("who listens has another secret, or another address")
    _check(secret, _LISTENER, claimed, reply)


def _random(message: Mapping[str, Any]) -> str:
    found = message.get("challenge")
    if not isinstance(found, str) or not re.fullmatch("[0-9a-f]{64}", found):
        raise Unproven("no challenge of 32 bytes")
    return found


def _proof(secret: bytes, role: str, claimed: Claim) -> str:
    said = json.dumps(["nebula handshake 1", role, *claimed])
    return hmac.digest(secret, said.encode(), "sha256").hex()


def _check(
    secret: bytes, role: str, claimed: Claim, message: Mapping[str, Any]
) -> None:
    shown = str(message.get("proof")).encode("utf-8", "replace")
    if not hmac.compare_digest(_proof(secret, role, claimed).encode(), shown):
        raise Unproven(f"no proof of a {role}")
