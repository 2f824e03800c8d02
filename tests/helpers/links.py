"""Two clusters joined by a real link, perhaps over a line that breaks."""

import concurrent.futures

from breakable_line import Proxy

from nebula_jax.communication import bridge, endpoints
from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication import listener as listener_lib
from nebula_jax.communication.wire import frames
from nebula_jax.security import tls
from nebula_jax.security.tls import certificates

SECONDS = 10.0  # to connect
IDENTITY = codec_lib.identity()
SETTINGS = {
    "peer_timeout": 5.0,
    "reconnect_timeout": 0.0,
    "tls": None,
    "log": lambda line: None,
}
"""The settings of both sides, unless a test gives others."""


def hello(cluster, settings=None, version="0.1"):
    return frames.Hello(cluster, version, settings or {})


def listening(ours="discriminator", address=("127.0.0.1", 0), **settings):
    """A listener; `ours` is its name or its Hello."""
    return listener_lib.Listener(
        endpoints.listen(address),
        ours if isinstance(ours, frames.Hello) else hello(ours),
        **SETTINGS | settings,
    )


def dial(address, theirs="generator:0", peer="discriminator", **settings):
    """A connector's link; `theirs` is its name or its Hello."""
    return bridge.connect(
        address,
        theirs if isinstance(theirs, frames.Hello) else hello(theirs),
        peer=peer,
        **SETTINGS | {"connect_timeout": SECONDS} | settings,
    )


def credentials(folder, encrypted=True):
    """The TLS of a listener and of generator 0; nothing of plain connections."""
    if not encrypted:
        return {}, {}
    names = ["discriminator", "generator:0", "generator:1"]
    certificates.issue_for_run(folder, names)
    return (
        {"tls": tls.server_contexts(folder / "discriminator")},
        {"tls": tls.client_contexts(folder / "generator-0")},
    )


def begin(here, there, step=0):
    """The run begins on a listener's and a connector's link."""
    here.welcome(step)
    assert there.wait_for_welcome(SECONDS) == step


class Pair:
    """A listener's link `here`, a connector's `there`; both abort when `stack` ends."""

    def __init__(self, stack, server=None, client=None, breaks=False, **settings):
        self.listener = stack.enter_context(listening(**settings | (server or {})))
        address = self.listener.address
        if breaks:
            self.proxy = Proxy(address)
            stack.callback(self.proxy.close)
            address = self.proxy.address
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            coming = pool.submit(dial, address, **settings | (client or {}))
            self.here = self.listener.accept(SECONDS)
            self.there = coming.result(SECONDS)
        stack.callback(self.there.abort, "done")
        stack.callback(self.here.abort, "done")

    def begin(self, step=0):
        begin(self.here, self.there, step)


def channel(sends, receives, name, spec, codec=IDENTITY):
    """Both ends of a channel: `Sender` on one link, `Receiver` on its peer's."""
    return sends.sender(name, spec, codec), receives.receiver(name, spec, codec)
