"""The steps from TLS between two trainers to sealed frames.

Inside TLS, both sides send an offer (see `security.seal`), and both end TLS. What
follows on the same connection are sealed frames, of which those who carry them can read
the heads, and change nothing. TLS to the end, through switches that see records alone,
would be less code. We chose frames, since a site then decides by kind what leaves: its
policy, its quotas and its audit log are of kinds, where those who carry TLS could count
bytes alone. A kind is the sender's word; what is bounded by it is its size.
"""

import selectors
import socket
import ssl
from collections.abc import Callable

from nebula_jax import errors
from nebula_jax.communication.wire import greeting, integrity, states
from nebula_jax.security import seal
from nebula_jax.security import tls as tls_lib
from nebula_jax.security.names import label
from nebula_jax.security.tls import credentials

Admit = Callable[[seal.Offer, bytes], None]
"""Given a peer's offer and its certificate (DER), raises errors.NebulaError unless it
may come."""


def finish(
    role: states.Role, offer: Callable[[], seal.Offer], admit: Admit
) -> greeting.Finish:
    """Returns the steps that make sealed frames of a TLS connection, by an `offer`."""

    def steps(sock: ssl.SSLSocket) -> greeting.Steps[greeting.Connected]:
        certificate = sock.getpeercert(True) or b""
        names = tls_lib.certificate_names(sock)
        ours = seal.Side(offer(), tls_lib.own_certificate(sock))
        yield from greeting.send(sock, ours.offer.encode())
        data = yield from greeting.read_exactly(sock, seal.OFFER_BYTES)
        peer = seal.Side(seal.read_offer(data), certificate)
        if peer.offer.secret == ours.offer.secret:
            text = "the peer sends back what it gets"
            raise credentials.CredentialsError("reflected", text)
        refusal: errors.NebulaError | None = None
        try:
            admit(peer.offer, certificate)
        except errors.NebulaError as error:
            if role is states.Role.CONNECTOR:
                raise
            refusal = error  # the peer ends when it reads it, and does not come back
        yield from greeting.when_ready(selectors.EVENT_READ, sock.unwrap)
        plain = socket.socket(fileno=sock.detach())
        plain.setblocking(False)
        if role is states.Role.CONNECTOR:
            sent, received = seal.seals(ours, peer)
        else:
            received, sent = seal.seals(peer, ours)
        tags = integrity.Both(sent, received)
        owner, clusters = ", ".join(sorted(names)), {label(peer.offer.cluster)}
        made = greeting.Connected(plain, tags, owner, frozenset(clusters))
        if refusal is not None:
            yield from greeting.refuse(made, str(refusal))
            raise refusal
        return made

    return steps
