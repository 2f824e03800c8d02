"""torch.distributed's gloo: send and recv between two ranks."""

import contextlib
import datetime
import os
from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed

from scripts.bench import transports


class _Gloo:
    def __init__(self, peer: int, sizes: tuple[int, ...]):
        self._peer = peer
        self._buffers = {size: torch.zeros(size, dtype=torch.uint8) for size in sizes}

    def send(self, buffer: np.ndarray) -> None:
        torch.distributed.send(torch.from_numpy(buffer), self._peer)

    def receive(self, size: int) -> np.ndarray:
        torch.distributed.recv(self._buffers[size], self._peer)
        return self._buffers[size].numpy()


@contextlib.contextmanager
def _rank(meeting: transports.Meeting, rank: int) -> Iterator[_Gloo]:
    host, port = meeting.address
    if host == "127.0.0.1":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # else it looks the host's name up
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"tcp://{host}:{port}",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=transports.CONNECT_SECONDS * 10),
    )
    try:
        yield _Gloo(1 - rank, meeting.sizes)
    finally:
        torch.distributed.destroy_process_group()


def listen(meeting: transports.Meeting) -> contextlib.AbstractContextManager[_Gloo]:
    """Binds and waits; see `transports`."""
    return _rank(meeting, 0)


def connect(meeting: transports.Meeting) -> contextlib.AbstractContextManager[_Gloo]:
    """Connects; see `transports`."""
    return _rank(meeting, 1)
