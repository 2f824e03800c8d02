"""Proofs that an account is who it claims to be, to a process of its own lab.

All trainers of a lab have one certificate: it shows the lab, not the account. So an
account proves that it has a token, which it does not send: the proof is a MAC under
what the store has of the token, over what it is for. A proof serves for one purpose, at
one lab, in one run of whoever checks it.

Who can read the store could make one. That is the user whose folder it is.
"""

import hmac
import json
from collections.abc import Sequence

from nebula_jax.security.accounts import identity_store, tokens

PROOF_BYTES = 32
_PURPOSE = b"nebula token proof 1\0"


def make(token: str, about: Sequence[str]) -> bytes:
    """Makes a proof.

    Args:
      token: of the account.
      about: all that it is for, such as a lab and a number drawn by who checks it.

    Raises:
      tokens.TokenError: if it is no token.
    """
    return _mac(tokens.digest(token), about)


def holds(
    store: identity_store.Store,
    account: str,
    about: Sequence[str],
    proof: bytes,
    now: float,
) -> bool:
    """Returns True if a proof was made with a token of an account that still serves.

    Args:
      store: of the lab's accounts.
      account: that it claims to be of.
      about: as in `make`.
      proof: as it came.
      now: unix seconds.
    """
    rows = store.rows(
        "SELECT digest FROM tokens WHERE account = ?"
        " AND (expires IS NULL OR expires > ?)",
        (account, now),
    )
    return any(hmac.compare_digest(_mac(row[0], about), proof) for row in rows)


def _mac(key: bytes, about: Sequence[str]) -> bytes:
    text = json.dumps(list(about), separators=(",", ":")).encode()
    return hmac.digest(key, _PURPOSE + text, "sha256")
