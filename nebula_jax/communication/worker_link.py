"""A link in a process that has no bridge: what the root's link is to the root."""

import dataclasses
import functools
import json

from nebula_jax import trace as trace_lib
from nebula_jax.communication import channels, ranks
from nebula_jax.communication.link import Link
from nebula_jax.communication.wire import frames


def share_peer(peer: frames.Hello | None) -> frames.Hello:
    """Returns the Hello of the root's peer in every process; others give None."""
    described = b"" if peer is None else json.dumps(dataclasses.asdict(peer)).encode()
    fields = json.loads(ranks.bytes_from_root(described))
    fields["checkpoints"] = tuple(fields["checkpoints"])
    return frames.Hello(**fields)


class WorkerLink:
    """A link without a line: tensors come from the root and go there (`channels`).

    Nothing waits here. What the root waits for, the others have when the root brings it
    to the devices.
    """

    def __init__(self, peer: frames.Hello, trace: trace_lib.Trace) -> None:
        """Makes a link to the root's peer, in the process of this trace."""
        self.peer, self.trace = peer, trace
        self.waited = self.round_trip = 0.0
        self.ledger: dict[str, list[int]] = {}
        self.outages: dict[str, float] = {}
        self.traffic: dict[str, int] = {}
        self.stop_step: int | None = None
        self.sender = functools.partial(channels.Sender, self, 0)
        """Opens a channel as the root does; so does `receiver`."""
        self.receiver = functools.partial(channels.Receiver, self, 0)

    def __enter__(self) -> "WorkerLink":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def put_tensor(self, message: frames.Tensor) -> None:
        """Refuses: the root sends."""
        raise AssertionError(message)

    def take_tensor(self, channel: int, what: str) -> frames.Tensor:
        """Refuses: the root receives."""
        raise AssertionError(channel, what)

    def arrived(self, channel: int) -> frames.Tensor | None:
        """Returns None: what has arrived is the root's."""

    def bytes_moved(self, direction: str) -> int:
        """Returns 0: the root counts what crosses."""
        return 0

    def welcome(self, step: int = 0) -> None:
        """Does nothing, as the three below: the root does."""

    step_done = stop = wait_for_step = welcome

    def wait_for_welcome(self, timeout: float) -> int:
        """Returns 0; the root has the step (`ranks.agree`)."""
        return 0


AnyLink = Link | WorkerLink  # in any process of this cluster
