"""The witnesses of audit logs: labs cosign the heads of each other's logs."""

import time
from collections.abc import Mapping
from typing import Any

from nebula_jax import errors, printable
from nebula_jax.communication import pending_connections
from nebula_jax.communication.wire import json_lines
from nebula_jax.federation import line
from nebula_jax.federation.state import State
from nebula_jax.security.audit import checkpoint_note, entries, witness

ANSWER_SECONDS = 20.0  # for a peer to cosign, before a head is sent once more
SHOWN = 200


class Cosigning:
    """The part of one lab: what was witnessed of its log, and what it has witnessed."""

    def __init__(self, state: State) -> None:
        """Opens what this lab has witnessed."""
        self._state = state
        self._witness = witness.Witness(state.folder.audit, state.lab)
        self._sent: dict[str, tuple[dict[str, Any], float]] = {}
        """Lab -> the message with the head that it has not cosigned yet, sent when."""
        self._due: set[str] = set()  # labs that get a newer one after their answer
        self._refusals: dict[str, pending_connections.RejectedLog] = {}  # by lab
        self._seen: dict[str, int] = {}  # lab -> size of this log that it has witnessed

    def _refused(self, lab: str, text: str, **what: Any) -> None:
        """Records what is wrong with a peer's log, a few times: it can cause many."""
        limit = self._refusals.setdefault(
            lab, pending_connections.RejectedLog(self._state.log)
        )
        others = limit.add(text, time.monotonic())
        if others is not None:
            about = {"others": others} if others else {}
            self._state.record("audit", lab, **what, **about)

    def begin(self, made: line.Line) -> None:
        """Begins with a new line: sends what was witnessed of the other's log."""
        self._seen.pop(made.lab, None)
        self._sent.pop(made.lab, None)
        made.send(op="witnessed", size=self._witness.size(made.lab))

    def send(self) -> None:
        """Has the peers cosign the head of the audit log."""
        for made in list(self._state.lines.values()):
            if made.lab in self._seen:
                self._send_head(made)

    def has_witnessed(self, made: line.Line, size: int) -> None:
        """Begins with how much of this log a peer has witnessed."""
        lab, log = made.lab, self._state.audit
        if size < log.cosigned(lab):
            text = f"{lab} has lost some of what it witnessed of this log"
            self._refused(lab, text, event="went back", size=size)
        self._seen[lab] = size
        self._send_head(made)

    def _send_head(self, made: line.Line) -> None:
        """Has a peer cosign the head, once it has answered for the one before.

        The proof begins with what the peer has seen: while an answer is in flight, that
        is not certain.
        """
        log, lab = self._state.audit, made.lab
        if lab in self._sent:
            self._due.add(lab)
            return
        self._due.discard(lab)
        text = log.sign_head()
        size = checkpoint_note.read(text).checkpoint.size
        if size < self._seen[lab]:
            self._state.log(
                f"{lab} has witnessed {self._seen[lab]} entries of this lab's audit"
                f" log, which has {size}: it was restored from an older copy"
            )
            return
        proof = log.consistency(self._seen[lab], size) if self._seen[lab] else []
        fields = {
            "checkpoint": text,
            "proof": [each.hex() for each in proof],
            "verifier": log.verifier,
        }
        self._sent[lab] = fields, time.monotonic()
        made.send(op="cosign", **fields)

    async def send_again(self) -> None:
        """Sends heads again to peers that could not answer, as with a full disk."""
        now = time.monotonic()
        for lab, (fields, since) in list(self._sent.items()):
            made = self._state.lines.get(lab)
            if made is None or made.is_closed:
                continue
            if now >= since + ANSWER_SECONDS:
                self._sent[lab] = fields, now
                made.send(op="cosign", **fields)

    def cosign_for(self, made: line.Line, fields: Mapping[str, Any]) -> None:
        """Cosigns the head of a peer's log, if it continues what was seen of it."""
        text = json_lines.field(fields, "checkpoint", str)
        verifier = json_lines.field(fields, "verifier", str)
        proof = [bytes.fromhex(str(each)) for each in fields.get("proof", [])]
        try:
            cosigned = self._witness.cosign(made.lab, text, proof, verifier)
        except errors.NebulaError as error:
            why = entries.without_secret(printable.line(str(error), SHOWN))
            text = f"the audit log of {made.lab} is not cosigned: {why}"
            self._refused(made.lab, text, event="not cosigned", why=why)
            return
        made.send(
            op="cosigned",
            checkpoint=text,
            line=cosigned.line,
            verifier=cosigned.verifier,
        )

    def cosigned(self, made: line.Line, fields: Mapping[str, Any]) -> None:
        """Takes a peer's signature under a head, if that was sent to it."""
        text = json_lines.field(fields, "checkpoint", str)
        sent = self._sent.get(made.lab)
        if sent is None or sent[0]["checkpoint"] != text:
            return  # a repeat, or to what a former line has sent: nothing waits for it
        del self._sent[made.lab]
        self._seen[made.lab] = checkpoint_note.read(text).checkpoint.size
        self._state.audit.add_cosignature(
            made.lab,
            text,
            json_lines.field(fields, "line", str),
            json_lines.field(fields, "verifier", str),
        )
        if made.lab in self._due:
            self._send_head(made)
