"""A link to oneself: both ends of every channel in one process, without any line."""

import collections
from typing import Any, NamedTuple

import nebula_jax
from nebula_jax import errors
from nebula_jax.communication import channels
from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication.wire import frames


class Loopback:
    """Carries tensors from its senders to its receivers.

    What is sent is received in this order by the same thread: `recv` of what was not
    sent is an error, since nobody else could bring it.
    """

    def __init__(self):
        self.peer = frames.Hello("this process", nebula_jax.__version__, {})
        self._inbox: dict[int, collections.deque[frames.Tensor]] = (
            collections.defaultdict(collections.deque)
        )
        self._compressed: list[bool] = []  # by sender: has a table of lengths
        self._receivers = 0
        self._names: list[str] = []  # by sender
        self.sent: collections.Counter[str] = collections.Counter()
        """Name of a channel -> bytes of its tensors so far; a link adds frame heads."""

    def sender(
        self, name: str, spec: codec_lib.Spec, codec: codec_lib.Codec
    ) -> channels.Sender:
        """A channel for arrays like `spec`."""
        self._compressed.append(codec.zstd is not None)
        self._names.append(name)
        return channels.Sender(self, len(self._compressed) - 1, name, spec, codec)

    def receiver(
        self, name: str, spec: codec_lib.Spec, codec: codec_lib.Codec, sharding=None
    ) -> channels.Receiver:
        """The other end of the first sender that has none yet."""
        self._receivers += 1
        channel = self._receivers - 1
        return channels.Receiver(self, channel, name, spec, codec, sharding)

    def put_tensor(self, message: frames.Tensor) -> None:
        """See `channels.Carrier`."""
        size = sum(memoryview(buffer).nbytes for buffer in message.buffers)
        self.sent[self._names[message.channel]] += size
        if self._compressed[message.channel]:  # a link reads the table by itself
            message = message._replace(buffers=message.buffers[1:])
        self._inbox[message.channel].append(message)

    def take_tensor(self, channel: int) -> frames.Tensor:
        """See `channels.Carrier`.

        Raises:
          errors.NebulaError: if there is none.
        """
        if not self._inbox[channel]:
            raise errors.NebulaError(f"nothing has been sent on channel {channel}")
        return self._inbox[channel].popleft()

    def has_tensor(self, channel: int) -> bool:
        """See `channels.Carrier`."""
        return bool(self._inbox[channel])


class End(NamedTuple):
    """One of two parties of this process, each of which opens its own channels."""

    out: Loopback
    into: Loopback

    def sender(self, name: str, spec: codec_lib.Spec, codec: codec_lib.Codec) -> Any:
        """A channel to the other end."""
        return self.out.sender(name, spec, codec)

    def receiver(
        self, name: str, spec: codec_lib.Spec, codec: codec_lib.Codec, sharding=None
    ) -> Any:
        """Of the other end's next channel."""
        return self.into.receiver(name, spec, codec, sharding)


def ends() -> tuple[End, End]:
    """Two parties: what one sends, the other receives, as over a link."""
    there, back = Loopback(), Loopback()
    return End(there, back), End(back, there)
