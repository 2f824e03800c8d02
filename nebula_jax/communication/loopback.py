"""Both ends of every channel in one process, without any line."""

import collections
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import nebula_jax
from nebula_jax import errors
from nebula_jax import trace as trace_lib
from nebula_jax.communication import agreement, channels, selector
from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication.wire import frames


class Loopback:
    """A channels.Transport from its senders to its receivers, in order.

    Where one thread sends and receives, to receive a tensor that was not sent is an
    error, since nobody else could send it; between threads the receiver waits.
    """

    trace = trace_lib.OFF

    def __init__(self, seconds: float = 0.0) -> None:
        """Makes a transport whose receivers wait for so many seconds."""
        self._seconds, self._has_come = seconds, threading.Condition()
        self.peer = frames.Hello("this process", nebula_jax.__version__, {})
        self._inbox: dict[int, collections.deque[frames.Tensor]] = (
            collections.defaultdict(collections.deque)
        )
        self._senders: list[agreement.Format] = []
        self._receivers: list[agreement.Format] = []
        self.sent: collections.Counter[str] = collections.Counter()
        """Name of a channel -> bytes of its tensors; a link adds heads and tables."""

    def sender(
        self, name: str, spec: codec_lib.Spec, codec: selector.CodecOrSelector
    ) -> channels.Sender:
        """Opens a channel; raises agreement.Mismatch if its receiver differs."""
        channel = len(self._senders)
        made = channels.Sender(self, channel, name, spec, codec)
        self._senders.append(made.format)
        self._compare(channel)
        return made

    def receiver(
        self,
        name: str,
        spec: codec_lib.Spec,
        codec: selector.CodecOrSelector,
        sharding: Any = None,
        check: channels.Check | None = None,
    ) -> channels.Receiver:
        """Opens the next sender's other end; agreement.Mismatch if they differ."""
        channel = len(self._receivers)
        made = channels.Receiver(self, channel, name, spec, codec, sharding, check)
        self._receivers.append(made.format)
        self._compare(channel)
        return made

    def _compare(self, channel: int) -> None:
        """Compares the two ends of a channel once both are open."""
        if channel < min(len(self._senders), len(self._receivers)):
            here, there = self._senders[channel], self._receivers[channel]
            agreement.compare(
                [agreement.describe(here)],
                [agreement.describe(there)],
                "the sending end",
                "the receiving end",
            )

    def put_tensor(self, message: frames.Tensor) -> None:
        """Queues a tensor."""
        size = sum(memoryview(buffer).nbytes for buffer in message.buffers)
        self.sent[self._senders[message.channel].name] += size
        with self._has_come:
            self._inbox[message.channel].append(message)
            self._has_come.notify_all()

    def take_tensor(self, channel: int, what: str) -> frames.Tensor:
        """Returns the next tensor; raises errors.NebulaError if there is none."""
        with self._has_come:
            if not self._has_come.wait_for(lambda: self._inbox[channel], self._seconds):
                raise errors.NebulaError(f"nobody has sent {what}")
            return self._inbox[channel].popleft()

    def arrived(self, channel: int) -> frames.Tensor | None:
        """Returns the next tensor of a channel, which stays; None if none is queued."""
        queue = self._inbox[channel]
        return queue[0] if queue else None


class End(NamedTuple):
    """One of two parties of this process, each of which opens its own channels."""

    sender: Callable[..., channels.Sender]  # opens a channel to the other end
    receiver: Callable[..., channels.Receiver]
    """Opens the receiving end of the other end's next channel."""
    sent: collections.Counter[str]  # what this end has sent, as `Loopback.sent`


def ends(seconds: float = 0.0) -> tuple[End, End]:
    """Makes two parties as over a link; between threads a receiver waits `seconds`."""
    forth, back = Loopback(seconds), Loopback(seconds)
    return (
        End(forth.sender, back.receiver, forth.sent),
        End(back.sender, forth.receiver, back.sent),
    )
