"""The project's bridge: buffers on a link, below the codecs."""

import contextlib
import functools
import sys
from collections.abc import Iterator

import jax
import numpy as np

import nebula_jax
from nebula_jax.communication import bridge, codec, endpoints, wan
from nebula_jax.communication import listener as listener_lib
from nebula_jax.communication.link import Link
from nebula_jax.communication.wire import frames
from nebula_jax.security import tls
from scripts.bench import transports

SETTINGS = {
    "peer_timeout": 60.0,  # seconds
    "reconnect_timeout": 0.0,  # a connection that breaks has failed, here
    "log": functools.partial(print, file=sys.stderr),
}


class _Bridge:
    def __init__(self, link: Link, sizes: tuple[int, ...]):
        self._link = link
        self._channels = {size: number for number, size in enumerate(sizes)}
        self._sent = 0
        for size in sizes:
            spec = jax.ShapeDtypeStruct((size,), np.uint8)
            link.sender(f"{size} bytes", spec, codec.identity())
            link.receiver(f"{size} bytes", spec, codec.identity())

    def send(self, buffer: np.ndarray) -> None:
        self._sent += 1
        channel = self._channels[len(buffer)]
        self._link.put_tensor(frames.Tensor(channel, self._sent, 0, [buffer]))

    def receive(self, size: int) -> np.ndarray:
        return self._link.take_tensor(self._channels[size]).buffers[0]


@contextlib.contextmanager
def listen(meeting: transports.Meeting) -> Iterator[_Bridge]:
    """Binds and waits; see `transports`."""
    own = meeting.credentials
    with (
        listener_lib.Listener(
            endpoints.listen(meeting.address),
            frames.Hello("discriminator", nebula_jax.__version__, {}),
            tls=tls.server_contexts(own) if own else None,
            line=wan.from_string(meeting.line).down,
            **SETTINGS,
        ) as listener,
        listener.accept(transports.CONNECT_SECONDS) as link,
    ):
        end = _Bridge(link, meeting.sizes)
        link.welcome(0)
        yield end


@contextlib.contextmanager
def connect(meeting: transports.Meeting) -> Iterator[_Bridge]:
    """Connects; see `transports`."""
    own = meeting.credentials
    with bridge.connect(
        meeting.address,
        frames.Hello("generator:0", nebula_jax.__version__, {}),
        connect_timeout=transports.CONNECT_SECONDS,
        peer="discriminator",
        tls=tls.client_contexts(own) if own else None,
        line=wan.from_string(meeting.line).up,
        **SETTINGS,
    ) as link:
        end = _Bridge(link, meeting.sizes)
        link.wait_for_welcome(transports.CONNECT_SECONDS)
        yield end
