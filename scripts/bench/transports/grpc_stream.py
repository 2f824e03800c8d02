"""gRPC: one call with a stream each way, of raw bytes in pieces; with TLS as well."""

import contextlib
import queue
from collections.abc import Iterable, Iterator
from concurrent import futures

import grpc
import numpy as np

from scripts.bench import transports

PIECE_BYTES = 1 << 20  # gRPC refuses messages of more than 4 MiB by default
MAX_WAITING = 4  # pieces
METHOD = "/bench/Talk"


class _Stream:
    def __init__(self, outgoing: queue.Queue, incoming: Iterable[bytes]):
        self._outgoing, self._incoming = outgoing, iter(incoming)
        self._buffers: dict[int, np.ndarray] = {}

    def send(self, buffer: np.ndarray) -> None:
        for start in range(0, len(buffer), PIECE_BYTES):
            self._outgoing.put(buffer[start : start + PIECE_BYTES].tobytes())

    def receive(self, size: int) -> np.ndarray:
        if size not in self._buffers:
            self._buffers[size] = np.zeros(size, np.uint8)
        view, filled = memoryview(self._buffers[size]), 0
        while filled < size:
            piece = next(self._incoming)
            view[filled : filled + len(piece)] = piece
            filled += len(piece)
        return self._buffers[size]


class _Handler(grpc.GenericRpcHandler):
    def __init__(self, outgoing: queue.Queue):
        self.outgoing = outgoing
        self.incoming: queue.Queue[Iterable[bytes]] = queue.Queue()

    def service(self, details):
        del details
        return grpc.stream_stream_rpc_method_handler(self._talk)

    def _talk(self, requests, context):
        del context
        self.incoming.put(requests)
        yield from iter(self.outgoing.get, None)


def _pem(meeting: transports.Meeting) -> list[bytes]:
    names = ("ca.pem", "key.pem", "cert.pem")
    return [(meeting.credentials / name).read_bytes() for name in names]


@contextlib.contextmanager
def listen(meeting: transports.Meeting) -> Iterator[_Stream]:
    """Binds and waits; see `transports`."""
    address = "{}:{}".format(*meeting.address)
    outgoing = queue.Queue(MAX_WAITING)
    handler = _Handler(outgoing)
    server = grpc.server(futures.ThreadPoolExecutor(2), handlers=[handler])
    if meeting.credentials:
        authority, key, certificate = _pem(meeting)
        credentials = grpc.ssl_server_credentials(
            [(key, certificate)], authority, require_client_auth=True
        )
        server.add_secure_port(address, credentials)
    else:
        server.add_insecure_port(address)
    server.start()
    yield _Stream(outgoing, handler.incoming.get(timeout=transports.CONNECT_SECONDS))
    outgoing.put(None)
    server.stop(grace=1.0).wait()


@contextlib.contextmanager
def connect(meeting: transports.Meeting) -> Iterator[_Stream]:
    """Connects; see `transports`."""
    address = "{}:{}".format(*meeting.address)
    outgoing = queue.Queue(MAX_WAITING)
    if meeting.credentials:
        credentials = grpc.ssl_channel_credentials(*_pem(meeting))
        options = [("grpc.ssl_target_name_override", "discriminator")]
        channel = grpc.secure_channel(address, credentials, options)
    else:
        channel = grpc.insecure_channel(address)
    with channel:
        call = channel.stream_stream(METHOD)
        yield _Stream(outgoing, call(iter(outgoing.get, None), wait_for_ready=True))
        outgoing.put(None)
