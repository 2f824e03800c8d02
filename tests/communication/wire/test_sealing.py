"""From TLS to sealed frames: what both ends check, and what they have then."""

import concurrent.futures
import ssl

import pytest
from two_contexts import connected

from nebula_jax.communication.wire import frames, greeting, reader, sealing
from nebula_jax.communication.wire.states import Role
from nebula_jax.security import seal, tls
from nebula_jax.security.tls import certificates, credentials

SECONDS = 10.0


@pytest.fixture
def ends(tmp_path):
    """Role -> its TLS socket."""
    certificates.issue_for_run(tmp_path, ["discriminator", "generator:0"])

    def context(side, name):
        return tls.context(side, credentials.load(tmp_path / name))

    server = context(ssl.PROTOCOL_TLS_SERVER, "discriminator")
    client = context(ssl.PROTOCOL_TLS_CLIENT, "generator-0")
    with connected(server, client) as (listener, connector):
        yield {Role.LISTENER: listener, Role.CONNECTOR: connector}


def finish(ends, offers, admit=lambda offer, certificate: None):
    """Role -> what its end has, or its error."""

    def steps(role):
        yield from greeting.shake_hands(ends[role])
        return (
            yield from sealing.finish(role, lambda: offers[role], admit)(ends[role])
        )

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        found = {
            role: pool.submit(greeting.run, steps(role), ends[role], 1e9, SECONDS)
            for role in Role
        }
        return {role: end.exception() or end.result() for role, end in found.items()}


def offers():
    return {
        Role.LISTENER: seal.offer(1, "discriminator", "m3"),
        Role.CONNECTOR: seal.offer(2, "generator:0", "m3"),
    }


def test_what_one_end_seals_the_other_reads_without_waiting(ends):
    made, admitted = offers(), []
    found = finish(ends, made, lambda offer, certificate: admitted.append(offer))
    assert set(admitted) == set(made.values())
    assert found[Role.LISTENER].clusters == {"generator-0"}
    assert found[Role.CONNECTOR].owner == "discriminator"
    opening = frames.Open(b"sixteen bytes id", 1)
    here, there = found[Role.CONNECTOR], found[Role.LISTENER]
    for each in found.values():
        assert not each.sock.getblocking()
    (data,) = frames.encode(opening, 0, 0, here.tags.sent)
    assert reader.read_opening(data, there.tags.received) == (opening, 0)
    for each in found.values():
        each.sock.close()


def test_a_peer_that_sends_back_what_it_gets_is_refused(ends):
    same = offers()[Role.LISTENER]
    for error in finish(ends, dict.fromkeys(Role, same)).values():
        assert isinstance(error, credentials.CredentialsError)
        assert "sends back what it gets" in str(error)
