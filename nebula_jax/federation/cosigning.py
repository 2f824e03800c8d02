"""The witnesses of audit logs: labs cosign the heads of each other's logs."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from nebula_jax import errors, printable
from nebula_jax.communication.wire import json_lines
from nebula_jax.federation import line
from nebula_jax.federation.state import State
from nebula_jax.security.audit import entries, signed_heads, witness
from nebula_jax.security.audit import log as audit_log
from nebula_jax.security.membership import member, site_folder
from nebula_jax.security.tls import certificates

ASK_SECONDS = 5.0  # for peers to tell what they have witnessed
ANSWER_SECONDS = 20.0  # for a peer to cosign, before a head is sent once more
SHOWN = 200


class Cosigning:
    """The part of one lab: what was witnessed of its log, and what it has witnessed.

    What waits for the disk is in a thread: streams go on meanwhile.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        root = member.pinned_authority(state.folder)
        key = certificates.log_key_of(root).hex()
        known = signed_heads.Verifier(member.issuing_lab(root), key)
        self._witness = witness.Witness(state.folder.audit, known)
        self._seen: dict[str, int] = {}  # lab -> size of this log that it has witnessed
        self._due: set[str] = set()  # labs that get the present head
        self._sent: dict[str, tuple[dict[str, Any], float]] = {}
        """Lab -> the message with the head that it has not cosigned yet, sent when."""
        self._asked: dict[tuple[str, str], asyncio.Future[str]] = {}
        """Peer, and the lab of whose log it was asked what it has witnessed."""

    async def begin(self, made: line.Line) -> None:
        """Begins with a new line: sends what was witnessed of the other's log."""
        self._seen.pop(made.lab, None)
        self._sent.pop(made.lab, None)
        size = await asyncio.to_thread(self._witness.size, made.lab)
        made.send(op="witnessed", size=size)

    def send(self) -> None:
        """Has the peers cosign the head of the audit log, at the next turn."""
        self._due |= self._seen.keys()

    def has_witnessed(self, made: line.Line, size: int) -> None:
        """Begins with how much of this log a peer has witnessed."""
        lab = made.lab
        if lab in self._seen:
            return  # it is said once on a line
        if size < 0:
            raise json_lines.Malformed(f"has witnessed {size} entries")
        if size < self._state.audit.cosigned(lab):
            text = f"{lab} has lost some of what it witnessed of this log"
            self._state.note(lab, text, "audit", lab, event="went back", size=size)
        self._seen[lab] = size
        self._due.add(lab)

    async def turn(self) -> None:
        """Sends heads that are due, again if unanswered: a peer's disk may be full.

        A proof begins with what the peer has seen: the next head waits for the answer.
        """
        for lab, made in list(self._state.lines.items()):
            fields, since = self._sent.get(lab, (None, 0.0))
            if fields is None and lab in self._due and lab in self._seen:
                fields = await self._head(lab)
            elif time.monotonic() < since + ANSWER_SECONDS:
                continue
            if fields is not None and self._state.lines.get(lab) is made:
                self._sent[lab] = fields, time.monotonic()
                made.send(op="cosign", **fields)

    async def _head(self, lab: str) -> dict[str, Any] | None:
        """Returns the message with the present head; None if a peer has seen more."""
        self._due.discard(lab)
        log = self._state.audit
        try:
            head, leaves = await asyncio.to_thread(log.head_after, self._seen[lab])
        except signed_heads.HeadError as error:
            self._state.log(
                f"{lab} has witnessed more of this lab's audit log than there is, which"
                f" was restored from an older copy: {error}"
            )
            return None
        if len(leaves) == audit_log.MOST_LEAVES:
            self._due.add(lab)  # it is far behind: more follow once these are seen
        proof = [each.hex() for each in leaves]
        return {"head": head.text, "proof": proof, "verifier": log.verifier.text}

    async def cosign_for(self, made: line.Line, fields: Mapping[str, Any]) -> None:
        """Cosigns the head of a peer's log, if it continues what was seen of it."""
        text = json_lines.field(fields, "head", str)
        verifier = json_lines.field(fields, "verifier", str)
        given = json_lines.field(fields, "proof", list)
        proof = [bytes.fromhex(str(each)) for each in given]
        try:
            head = await asyncio.to_thread(
                self._witness.keep, made.lab, text, proof, verifier
            )
        except errors.NebulaError as error:
            why = entries.without_secret(printable.line(str(error), SHOWN))
            text = f"the audit log of {made.lab} is not cosigned: {why}"
            about = {"event": "not cosigned", "why": why}
            self._state.note(made.lab, text, "audit", made.lab, **about)
            return
        cosignature = self._state.audit.cosign(head)
        made.send(op="cosigned", head=text, cosignature=cosignature.text)

    async def ask(self, lab: str) -> dict[str, str | None]:
        """Asks the other labs what each has witnessed of a lab's log.

        Returns lab -> the head, "" if it has witnessed none, None without an answer.
        Who asks while another does gets the same answers. Raises
        site_folder.FederationError if no lab can have this name.
        """
        site_folder.check_lab(lab)
        answers = {}
        for peer, made in self._state.lines.items():
            if peer == lab:
                continue
            if (future := self._asked.get((peer, lab))) is None:
                future = asyncio.get_running_loop().create_future()
                self._asked[peer, lab] = future
                made.send(op="seen", of=lab)
            answers[peer] = future
        if answers:
            await asyncio.wait(answers.values(), timeout=ASK_SECONDS)
        for peer, future in answers.items():
            if self._asked.get((peer, lab)) is future:
                del self._asked[peer, lab]
        told = {each: one.result() for each, one in answers.items() if one.done()}
        return dict.fromkeys(self._state.members - {lab}) | told

    async def tell(self, made: line.Line, lab: str) -> None:
        """Tells a peer which head of a lab's log was witnessed here."""
        try:
            seen = await asyncio.to_thread(self._witness.seen, lab)
        except (errors.NebulaError, OSError) as error:
            text = f"what was witnessed of {lab} cannot be told: {error}"
            self._state.note(
                made.lab, text, "audit", made.lab, event="not told", of=lab
            )
            return
        made.send(op="saw", of=lab, head=seen.head.text if seen else "")

    def told(self, made: line.Line, lab: str, text: str) -> None:
        """Takes what a peer tells of a log, if it was asked; an error if no head."""
        if text:
            signed_heads.read(text)
        answer = self._asked.pop((made.lab, lab), None)
        if answer is not None and not answer.done():
            answer.set_result(text)

    async def cosigned(self, made: line.Line, fields: Mapping[str, Any]) -> None:
        """Takes a peer's signature under a head, if that was sent to it."""
        lab, text = made.lab, json_lines.field(fields, "head", str)
        cosignature = json_lines.field(fields, "cosignature", str)
        sent = self._sent.get(lab)
        if sent is None or sent[0]["head"] != text:
            return  # a repeat, or to what a former line has sent: nothing waits for it
        del self._sent[lab]
        self._seen[lab] = signed_heads.read(text).size
        given = lab, text, cosignature
        await asyncio.to_thread(self._state.audit.add_cosignature, *given)
