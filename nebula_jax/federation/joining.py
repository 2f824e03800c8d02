"""The way into a federation: an invitation in exchange for certificates.

The lab that joins has no certificate and trusts nobody yet. It first gets the
authority's certificate, which must have the invitation's fingerprint; then it connects
anew, to a switch with a certificate of that authority, and shows there that it has the
invitation's secret. The switch passes requests on to the authority, and changes none.
"""

import asyncio
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from cryptography import x509

from nebula_jax import errors, printable
from nebula_jax.communication.wire import json_lines
from nebula_jax.federation import inner
from nebula_jax.security import tls
from nebula_jax.security.audit import log as audit_log
from nebula_jax.security.membership import (
    authority,
    invitations,
    member,
    revocation,
    site_folder,
)
from nebula_jax.security.tls import between_labs, certificates

ANSWER_SECONDS = 10.0
SHOWN = 500
CLAIM = ("number", "mac")  # fields of a request to join: an `invitations.Claim`


class JoinError(errors.NebulaError):
    """A federation that could not be joined."""


class Unreachable(JoinError):
    """An authority that does not answer at an address, or is not there."""


Ask = Callable[[Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
"""Sends a request to the authority and returns its answer; see `answer`."""


async def serve(
    stream: tuple[asyncio.StreamReader, asyncio.StreamWriter], ask: Ask, seconds: float
) -> Mapping[str, Any]:
    """Serves the one request of a connection without a certificate, within `seconds`.

    Returns request and answer, to be logged. A refusal is sent, and raises NebulaError.
    """
    reader, writer = stream
    try:
        async with asyncio.timeout(seconds):
            fields = await json_lines.read_from(reader)
        made = await ask(fields)
    except json_lines.Nothing:
        raise
    except errors.NebulaError as error:
        writer.write(json_lines.encode({"error": str(error)}))
        await writer.drain()
        raise
    writer.write(json_lines.encode(made))
    await writer.drain()
    return {**fields, **made}


def answer(
    fields: Mapping[str, Any], issuer: authority.LocalAuthority
) -> Mapping[str, Any]:
    """Returns the authority's answer to anybody; raises NebulaError if it refuses."""
    op = json_lines.field(fields, "op", str)
    if op == "authority":
        return {"authority": issuer.certificate().decode(), "time": time.time()}
    if op == "list":  # signed by the authority, and for everybody
        number, text = issuer.revocation_list()
        return {"revocations": "" if fields.get("number") == number else text}
    if op == "renew":
        pem, lab, role = issuer.renew(member.Renewal.parse(fields))
        return {"lab": lab, "issued": {role: pem.decode()}}
    if op == "attach":
        texts = (json_lines.field(fields, name, str) for name in ("pem", "receipt"))
        pem, receipt = (each.encode("ascii", "replace") for each in texts)
        return {"pem": issuer.attach(pem, bytes.fromhex(receipt.decode())).decode()}
    if op != "join":
        raise json_lines.Malformed(
            f"requested {printable.line(op, SHOWN)} without a certificate"
        )
    lab = json_lines.field(fields, "lab", str)
    requests = {
        role: json_lines.field(fields, role, str).encode() for role in site_folder.ROLES
    }
    for each in requests.values():
        authority.requested_key(each)
    claim = invitations.Claim(
        *(bytes.fromhex(json_lines.field(fields, name, str)) for name in CLAIM)
    )
    issuer.redeem(claim, lab, list(requests.values()))
    made = {role: issuer.certify(csr, lab, role) for role, csr in requests.items()}
    return {
        "revocations": issuer.revocation_list()[1],
        "lab": lab,
        "issued": {role: pem.decode() for role, pem in made.items()},
    }


def logged(log: audit_log.Log, lab: str, role: str, pem: str) -> Mapping[str, Any]:
    """Records a certificate that the authority has issued, in the log of its lab.

    Returns the request to put the log's receipt into it: before, no peer takes it.
    Raises errors.NebulaError if it is no certificate, or the disk does not take it.
    """
    try:
        made = x509.load_pem_x509_certificate(pem.encode("ascii", "replace"))
        facts = certificates.facts(made)
    except site_folder.UNREADABLE:
        raise json_lines.Malformed("sent no certificate") from None
    about = {"lab": lab, "role": role, "serial": f"{made.serial_number:x}"}
    log.append("certificate", log.lab, event="issued", **about)
    return {"op": "attach", "pem": pem, "receipt": log.receipt(facts).hex()}


def join(folder: site_folder.Folder, invitation: invitations.Invitation) -> None:
    """Joins a federation: makes keys, and has them certified.

    A lab that was revoked, was off for too long, or whose keys were stolen, comes back
    so: it gets other certificates, and keeps all else in its `folder` (accounts, log,
    what it has witnessed, incarnations). The authority's lab asks its own switch, from
    inside: nobody elsewhere can take its place. Raises errors.NebulaError with the
    reason if it is refused; then no credentials are made.
    """
    here = _here(folder, invitation)
    address = invitation.address if here is None or here.authority else ""

    def asked(
        fields: dict[str, str], context: ssl.SSLContext, name: str | None
    ) -> Mapping[str, Any]:
        if not address:
            return inner.ask(folder, ANSWER_SECONDS, **fields)
        return _request(address, fields, context, name)

    context = between_labs.unverified_context()
    answer = asked({"op": "authority"}, context, None)
    ca = _text(answer, "authority")
    trusted = member.trusted_authority(ca, invitation.fingerprint)
    context, name = between_labs.joining_context(trusted)
    requests = {role: member.new_request() for role in site_folder.ROLES}
    fields = {role: each.csr.decode() for role, each in requests.items()}
    sent = [each.csr for each in requests.values()]
    claim = invitations.claim(invitation.secret, invitation.lab, sent)
    fields |= {"op": "join", "lab": invitation.lab}
    fields |= {name: each.hex() for name, each in zip(CLAIM, claim, strict=True)}
    agreed = invitation.lab, address, invitation.fingerprint
    folder.create(*agreed, is_back=here is not None)
    answer = asked(fields, context, name)
    issued = json_lines.field(answer, "issued", dict)
    for role, request in requests.items():
        member.install(folder, role, request.key, _text(issued, role), ca)
        revocation.RevocationList(folder, role).accept(str(answer["revocations"]))


def _here(
    folder: site_folder.Folder, invitation: invitations.Invitation
) -> site_folder.Settings | None:
    """Returns the settings of the lab if it is here, to get other credentials."""
    if not any(folder.credentials(role).exists() for role in site_folder.ROLES):
        return None  # it may have been stopped while it joined
    here, wanted = folder.load(), (invitation.lab, invitation.fingerprint)
    return here if (here.name, here.fingerprint) == wanted else None


def ask(
    folder: site_folder.Folder, fields: Mapping[str, Any], addresses: Sequence[str] = ()
) -> Mapping[str, Any]:
    """Asks the authority, which is at another lab; see `answer`.

    The connection is one of its own, to the switch of that lab or, if it has moved, to
    one at `addresses`, and needs neither certificate nor revocation list of this lab:
    they may be what is asked for. Raises errors.NebulaError if it cannot be reached, or
    refuses.
    """
    settings = folder.load()
    context, name = between_labs.joining_context(member.pinned_authority(folder))
    failed = []
    for address in (settings.authority, *addresses):
        try:
            return _request(address, fields, context, name)
        except Unreachable as error:
            failed.append(error)
    raise failed[0]


def clock_ahead(address: str) -> float:
    """Returns the seconds by which this clock is ahead of that of a switch (host:port).

    Verifies nothing: with a wrong clock that fails. Raises JoinError without an answer.
    """
    context = between_labs.unverified_context()
    began = time.time()
    answer = _request(address, {"op": "authority"}, context, None)
    return (began + time.time()) / 2 - float(json_lines.field(answer, "time", float))


def _text(answer: Mapping[str, Any], name: str) -> bytes:
    return str(json_lines.field(answer, name, str)).encode()


def _request(
    address: str, fields: Mapping[str, Any], context: ssl.SSLContext, lab: str | None
) -> Mapping[str, Any]:
    """Returns the answer of the switch at host:port, of `lab`; of any, if None."""
    host, _, port = address.rpartition(":")
    try:
        with (
            socket.create_connection(
                (host.strip("[]"), int(port)), ANSWER_SECONDS
            ) as sock,
            context.wrap_socket(sock, server_hostname=lab) as secure,
        ):
            secure.sendall(json_lines.encode(fields))
            answer = json_lines.read(secure)
    except ssl.SSLCertVerificationError as error:
        raise Unreachable(
            f"{address}: not the switch of {lab}, which issues certificates:"
            f" {between_labs.in_words(error)}"
        ) from None
    except (OSError, EOFError) as error:
        reason = tls.in_words(error)
        if not isinstance(error, ssl.SSLError):
            reason = getattr(error, "strerror", None) or reason
        raise Unreachable(
            f"{address}: no switch answers there: {reason}; is `nebula"
            " switch` running at the lab that issues certificates?"
        ) from None
    if "error" in answer:
        text = printable.line(str(answer["error"]), SHOWN)
        raise JoinError(f"{address} refused: {text}")
    return answer


def found(folder: site_folder.Folder, name: str) -> authority.LocalAuthority:
    """Founds a federation with one lab and its credentials; returns the authority."""
    site_folder.check_lab(name)
    folder.prepare()
    with audit_log.Log(folder.audit, name) as log:
        log_key = bytes.fromhex(log.verifier.key)
        issuer = authority.LocalAuthority.create(folder, name, log_key)
        folder.create(name, fingerprint=issuer.fingerprint)
        for role in site_folder.ROLES:
            request = member.new_request()
            pem = issuer.certify(request.csr, name, role).decode()
            made = answer(logged(log, name, role, pem), issuer)
            ca = issuer.certificate()
            member.install(folder, role, request.key, _text(made, "pem"), ca)
            revocation.RevocationList(folder, role).accept(issuer.revocation_list()[1])
    return issuer
