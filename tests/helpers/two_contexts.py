"""A TLS handshake without sockets."""

import ssl


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
