"""Both ends of TLS: a handshake without sockets, and sockets before their handshake."""

import contextlib
import socket
import ssl

from nebula_jax.communication.wire import greeting


def shake_hands(server_context, client_context, name="discriminator"):
    """A handshake in memory; the client's SSLObject."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    client = client_context.wrap_bio(to_client, to_server, server_hostname=name)
    open_ends = [client, server]
    for _ in range(10):
        for end in list(open_ends):
            try:
                end.do_handshake()
                open_ends.remove(end)
            except ssl.SSLWantReadError:
                pass
    assert not open_ends
    return client


@contextlib.contextmanager
def connected(server_context, client_context, name="discriminator"):
    """Yields a server's and a client's socket, before their handshake."""
    later = {"do_handshake_on_connect": False}
    here, there = map(greeting.set_up, socket.socketpair())
    with (
        server_context.wrap_socket(here, server_side=True, **later) as server,
        client_context.wrap_socket(there, server_hostname=name, **later) as client,
    ):
        yield server, client
