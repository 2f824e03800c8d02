"""The two ends of a channel: arrays on a device, buffers on a link.

Only buffers travel. Both ends know the spec of what a channel carries; the receiver
derives the payload's structure from it.
"""

from typing import Any, Protocol

import jax
import numpy as np

from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication.wire import frames, session, zstd


class Carrier(Protocol):
    """What a channel asks of its link."""

    @property
    def peer(self) -> frames.Hello:
        """The other side's Hello."""

    def put_tensor(self, message: frames.Tensor) -> None:
        """Queues a tensor; blocks while too much waits."""

    def take_tensor(self, channel: int) -> frames.Tensor:
        """The next tensor of a channel; waits for it."""

    def has_tensor(self, channel: int) -> bool:
        """Whether `take_tensor` would return at once."""


class Sender:
    """The near end of a channel."""

    def __init__(
        self,
        link: Carrier,
        channel: int,
        name: str,
        spec: codec_lib.Spec,
        codec: codec_lib.Codec,
    ):
        self.name = name
        self._link, self._channel, self._choose = link, channel, codec.choose
        self._encode = [
            jax.jit(option.encode, donate_argnums=1)
            for option in codec_lib.fixed(codec)
        ]
        self._zstd = None if codec.zstd is None else zstd.Compressor(codec.zstd)
        self.state = codec.init(spec)
        """The codec's, to be saved with the run's state; the next tensor uses it up."""

    def send(self, step: int, arrays: Any, micro_batch: int = 0) -> None:
        """Encodes on the device and queues the bytes; blocks while too much waits.

        Args:
          step: optimisation step, counted from 1: part of the tag that the receiver
            checks, and what codecs go by that begin later.
          arrays: pytree of the channel's spec.
          micro_batch: the rest of the tag.
        """
        option = 0
        if self._choose is not None:
            option = self._choose(arrays, self.state, step)
        payload, self.state = self._encode[option](arrays, self.state)
        self.send_payload(step, payload, option, micro_batch)

    def send_payload(
        self, step: int, payload: Any, option: int = 0, micro_batch: int = 0
    ) -> None:
        """Queues what was encoded elsewhere, in a jit of its own; see `training.cut`.

        Args:
          step: as in `send`.
          payload: of the codec's option `option`.
          option: see there.
          micro_batch: as in `send`.
        """
        buffers = [as_bytes(leaf) for leaf in jax.tree.leaves(payload)]
        if self._zstd is not None:
            buffers = self._zstd.compress(buffers)
        self._link.put_tensor(
            frames.Tensor(self._channel, step, micro_batch, buffers, option)
        )


class Receiver:
    """The far end of a channel."""

    def __init__(
        self,
        link: Carrier,
        channel: int,
        name: str,
        spec: codec_lib.Spec,
        codec: codec_lib.Codec,
        sharding: Any,
    ):
        self.name = name
        self._link, self._channel, self._sharding = link, channel, sharding
        options = codec_lib.fixed(codec)
        self._payloads = [codec_lib.payload_spec(option, spec) for option in options]
        self._decode = [
            jax.jit(option.decode, out_shardings=(sharding, None), donate_argnums=1)
            for option in options
        ]
        self._zstd = None if codec.zstd is None else zstd.Decompressor()
        self.state = codec.init(spec)
        """The codec's, to be saved with the run's state; the next tensor uses it up."""

    def recv(self, step: int, micro_batch: int = 0) -> Any:
        """Waits for the tensor with this tag and decodes it on the device.

        Raises:
          protocol.RemoteProtocolError: if another one comes, or it cannot be decoded.
        """
        payload, option = self.recv_payload(step, micro_batch)
        arrays, self.state = self._decode[option](payload, self.state)
        return arrays

    @property
    def has_arrived(self) -> bool:
        """Whether `recv` would return at once."""
        return self._link.has_tensor(self._channel)

    def recv_payload(self, step: int, micro_batch: int = 0) -> tuple[Any, int]:
        """Waits for the tensor with this tag; leaves it to the caller to decode.

        Returns:
          The payload, arrays on the host, and the number of the codec's option.

        Raises:
          protocol.RemoteProtocolError: if another one comes.
        """
        message = self._link.take_tensor(self._channel)
        if (message.step, message.micro_batch) != (step, micro_batch):
            raise session.RemoteProtocolError(
                f"{self._link.peer.cluster} sent {self.name} for step {message.step},"
                f" micro-batch {message.micro_batch}; expected step {step},"
                f" micro-batch {micro_batch}"
            )
        specs, structure = jax.tree.flatten(self._payloads[message.option])
        leaves = [
            buffer.view(leaf.dtype).reshape(leaf.shape)
            for buffer, leaf in zip(self._plain(message, specs), specs, strict=True)
        ]
        return jax.tree.unflatten(structure, leaves), message.option

    def _plain(self, message: frames.Tensor, specs: list[Any]) -> list[np.ndarray]:
        if self._zstd is None:
            return message.buffers
        sizes = [codec_lib.nbytes(leaf) for leaf in specs]
        try:
            return self._zstd.decompress(message.buffers, sizes)
        except zstd.EntropyError as error:
            raise session.RemoteProtocolError(
                f"{self._link.peer.cluster} {error}, as {self.name}"
                f" of step {message.step}"
            ) from None


def as_bytes(leaf: jax.Array) -> np.ndarray:
    """[n] uint8 over the bytes of an array of any dtype and shape, without a copy."""
    return np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
