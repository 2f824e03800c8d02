"""The two ends of a channel: arrays on a device, buffers on a link.

`Sender.send` and `Receiver.recv` encode and decode by themselves, and keep the codec's
state for it. Where a codec is part of another program (`training.cut`), that program's
caller has the state, and payloads cross as they are: `send_payload`, `recv_payload`.

In a cluster of many processes all of them call both ends, in the same order. The root
alone has the line (`ranks`).
"""

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from nebula_jax import trace as trace_lib
from nebula_jax.communication import agreement, arrivals, ranks, selector
from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication.wire import frames, session, zstd

_NONE = -1  # in the place of a step, where processes agree on one


class Transport(Protocol):
    """A way for a channel's tensors: a link, or a loopback."""

    @property
    def peer(self) -> frames.Hello:
        """The other side's Hello."""

    @property
    def trace(self) -> trace_lib.Trace:
        """The trace of this process."""

    def put_tensor(self, message: frames.Tensor) -> None:
        """Queues a tensor; blocks while too much waits."""

    def take_tensor(self, channel: int, what: str) -> frames.Tensor:
        """Waits for the next tensor of a channel; `what` names it in errors."""

    def arrived(self, channel: int) -> frames.Tensor | None:
        """Returns what `take_tensor` would return at once; None if it would wait."""


Check = Callable[[codec_lib.Arrays], None]  # raises ValueError at what must not be


class Sender:
    """The sending end of channel number `channel` of a transport.

    `name` stands in errors and byte counts, `spec` is of the arrays. A Selector's
    choice of a codec is sent with every tensor.
    """

    def __init__(
        self,
        transport: Transport,
        channel: int,
        name: str,
        spec: codec_lib.Spec,
        codec: selector.CodecOrSelector,
    ) -> None:
        self.name, self.trace = name, transport.trace
        self.format = agreement.format_of(name, spec, codec)
        self._transport, self._channel, self._spec = transport, channel, spec
        self._codec = selector.compiled(codec)
        level = codec.zstd
        self._compressor = None if level is None else zstd.Compressor(level)

    @functools.cached_property
    def state(self) -> codec_lib.State:
        """The state of `send`'s codec; the next tensor uses it up."""
        return self._codec.init(self._spec)

    def send(self, step: int, arrays: Any, micro_batch: int = 0) -> None:
        """Encodes on the device and queues the bytes; blocks while too much waits.

        `step` counts from 1: part of the tag that the receiver checks, and an argument
        of a Selector's choice. Raises agreement.FormatError if the arrays are not of
        the spec.
        """
        self.format.check(arrays)
        self.trace.ready(arrays)  # that is not the codec's time
        with self.trace.span("encode", tensor=self.name):
            selected, self.state = self._codec.encode(arrays, self.state, step)
            self.trace.ready(selected.payload)
        self.send_payload(step, selected, micro_batch)

    def send_payload(
        self, step: int, selected: selector.Selected, micro_batch: int = 0
    ) -> None:
        """Queues a payload that was encoded elsewhere; see `training.cut`.

        Raises agreement.FormatError if it is no payload of the channel's codec.
        """
        self.format.check_payload(selected)
        with self.trace.span("send", tensor=self.name, micro_batch=micro_batch):
            payload = ranks.everywhere(selected.payload)
            if not ranks.is_root():
                return
            buffers = [as_bytes(leaf) for leaf in jax.tree.leaves(payload)]
            if self._compressor is not None:
                buffers = self._compressor.compress(buffers)
            tag = self._channel, step, micro_batch
            self._transport.put_tensor(frames.Tensor(*tag, buffers, selected.option))

    def end_step(self, step: int, micro_batches: int, identity: Any = None) -> None:
        """Ends a step: the receiver compares micro-batches and the batch's identity."""
        if ranks.is_root():
            tag, buffers = (self._channel, step), [identity_bytes(identity)]
            self._transport.put_tensor(
                frames.Tensor(*tag, micro_batches, buffers, frames.STEP_END)
            )


class Receiver:
    """The receiving end of a channel.

    `sharding` is of the received arrays on this cluster's devices. `check` raises
    ValueError at arrays that `recv` must not return. With a check, raises ValueError if
    the codec has a state. What a payload can hold is checked in any case (`arrivals`).
    In a cluster of several processes the root does both.
    """

    def __init__(
        self,
        transport: Transport,
        channel: int,
        name: str,
        spec: codec_lib.Spec,
        codec: selector.CodecOrSelector,
        sharding: Any = None,
        check: Check | None = None,
    ) -> None:
        self.name, self.trace, self._check = name, transport.trace, check
        self.is_compared = True  # False if a batch had no identity here or there
        self.format = agreement.format_of(name, spec, codec)
        self._transport, self._channel, self._spec = transport, channel, spec
        self._codec = selector.compiled(codec, sharding)
        self._codec_here = selector.compiled(codec)  # on the root's device, for `check`
        state = jax.eval_shape(lambda: self._codec.init(spec))
        if check is not None and jax.tree.leaves(state):
            raise ValueError(f"{name}: its codec has a state, so it can have no check")
        self._decompressor = None
        if codec.zstd is not None:
            self._decompressor = zstd.Decompressor()

    @functools.cached_property
    def state(self) -> codec_lib.State:
        """The state of `recv`'s codec; the next tensor uses it up."""
        return self._codec.init(self._spec)

    def recv(self, step: int, micro_batch: int = 0) -> Any:
        """Waits for the tensor with this tag and decodes it on the device.

        Raises session.RemoteProtocolError if another one comes, it cannot be decoded,
        or it has a value that cannot be.
        """
        return self._recv(step, [micro_batch])[0]

    def recv_all(self, step: int, micro_batches: int) -> list[Any]:
        """Waits for all micro-batches of a step, and decodes them; see `recv`.

        In a cluster of several processes they are brought to the devices together.
        """
        return self._recv(step, range(micro_batches))

    def _recv(self, step: int, micro_batches: Sequence[int]) -> list[Any]:
        decoded = []
        received = self._recv_payloads(step, micro_batches)
        for selected, number in zip(received, micro_batches, strict=True):
            with self.trace.span("decode", tensor=self.name):
                arrays, self.state = self._codec.decode(selected, self.state)
                if self._check is not None and ranks.count() == 1:
                    self._verify(self._check, arrays, step, number)
                decoded.append(self.trace.ready(arrays))
        return decoded

    @property
    def has_arrived(self) -> bool:
        """True if `recv` would return at once, as the root has it."""
        return self.next_step is not None

    @property
    def next_step(self) -> int | None:
        """The step of the tensor that comes next; None if it has not arrived yet."""
        message = self._transport.arrived(self._channel)
        step = ranks.agree(_NONE if message is None else message.step)
        return None if step == _NONE else step

    def drop(self) -> None:
        """Drops, unread, the tensor that has arrived: not where a codec has a state."""
        if ranks.is_root():
            self._transport.take_tensor(self._channel, self.name)

    def recv_payload(self, step: int, micro_batch: int = 0) -> selector.Selected:
        """Waits for the tensor with this tag; leaves it to the caller to decode.

        Returns the payload, and the number of the codec that encoded it. Its arrays are
        on the host, or on the devices of all processes if there are several. Raises
        session.RemoteProtocolError as `recv`, and at bytes that zstd cannot decompress.
        """
        return self._recv_payloads(step, [micro_batch])[0]

    def recv_end(self, step: int, micro_batches: int, identity: Any = None) -> None:
        """Waits for the end of a step, and compares the batch with the sender's.

        Raises session.RemoteProtocolError if the sender has more or fewer
        micro-batches, or both have an identity and these differ.
        """
        if not ranks.is_root():
            return
        what = f"the end of {self.name} of step {step}"
        message = self._transport.take_tensor(self._channel, what)
        tag = message.step, message.micro_batch, message.is_end
        if tag != (step, micro_batches, True):
            raise self._miscounted(message, step, str(micro_batches))
        theirs, ours = bytes(message.buffers[0]), identity_bytes(identity)
        self.is_compared = identity_bytes(None) not in (theirs, ours)
        if self.is_compared and theirs != ours:
            raise self._fault(
                f"has another batch in step {step} than this side (identities"
                f" {theirs.hex()} and {ours.hex()}): draw batches by step, with the"
                " same seed on both sides"
            )

    def _miscounted(
        self, message: frames.Tensor, step: int, here: str
    ) -> session.RemoteProtocolError:
        """Returns the error of a step with another number of micro-batches there."""
        count = message.micro_batch
        there = str(count) if message.is_end else f"at least {count + 1}"
        return self._fault(
            f"has {there} micro-batches in step {message.step}, this side {here} in"
            f" step {step}: cut a batch into as many on both sides"
        )

    def _fault(self, what: str) -> session.RemoteProtocolError:
        return session.RemoteProtocolError(f"{self._transport.peer.cluster} {what}")

    def _recv_payloads(
        self, step: int, micro_batches: Sequence[int]
    ) -> list[selector.Selected]:
        with self.trace.span("receive", tensor=self.name, step=step):
            if ranks.count() == 1:
                return [self._receive(step, number) for number in micro_batches]
            options, payloads = [0] * len(micro_batches), None
            if ranks.is_root():
                received = [self._receive(step, number) for number in micro_batches]
                options = [each.option for each in received]
                payloads = [each.payload for each in received]
            options = [int(each) for each in ranks.exchange(options)[ranks.ROOT]]
            like = [self.format.payloads[option] for option in options]
            payloads = ranks.from_root(payloads, like)
            return list(map(selector.Selected, payloads, options))

    def _receive(self, step: int, micro_batch: int) -> selector.Selected:
        what = f"{self.name} of step {step}, micro-batch {micro_batch}"
        message = self._transport.take_tensor(self._channel, what)
        if message.is_end:
            raise self._miscounted(message, step, f"at least {micro_batch + 1}")
        if (message.step, message.micro_batch) != (step, micro_batch):
            raise self._fault(
                f"sent {self.name} for step {message.step}, micro-batch"
                f" {message.micro_batch}; expected step {step}, micro-batch"
                f" {micro_batch}"
            )
        specs, structure = jax.tree.flatten(self.format.payloads[message.option])
        leaves = [
            buffer.view(leaf.dtype).reshape(leaf.shape)
            for buffer, leaf in zip(
                self._decompressed(message, specs), specs, strict=True
            )
        ]
        payload = jax.tree.unflatten(structure, leaves)
        self._verify(arrivals.check_payload, payload, step, micro_batch)
        selected = selector.Selected(payload, message.option)
        if self._check is not None and ranks.count() > 1:
            nothing = self._codec_here.init(self._spec)
            whole, _ = self._codec_here.decode(selected, nothing)
            self._verify(self._check, whole, step, micro_batch)
        return selected

    def _verify(
        self, check: Callable[[Any], None], values: Any, step: int, micro_batch: int
    ) -> None:
        try:
            check(values)
        except ValueError as error:
            raise self._fault(
                f"sent {self.name} for step {step}, micro-batch {micro_batch}, that"
                f" cannot be: {error}"
            ) from None

    def _decompressed(
        self, message: frames.Tensor, specs: list[Any]
    ) -> Sequence[np.ndarray]:
        if self._decompressor is None:
            return message.buffers
        sizes = [codec_lib.nbytes(leaf) for leaf in specs]
        try:
            return self._decompressor.decompress(message.buffers, sizes)
        except zstd.EntropyError as error:
            what = f"{error}, as {self.name} of step {message.step}"
            raise self._fault(what) from None


class Carrier(Protocol):
    """A link, or one end of a loopback: a party opens its channels on it."""

    @property
    def sender(self) -> Callable[..., Sender]:
        """The function that opens a channel to the peer, in the order of both ends."""

    @property
    def receiver(self) -> Callable[..., Receiver]:
        """The function that opens the receiving end of the peer's next channel."""


def as_bytes(leaf: jax.Array) -> np.ndarray:
    """Views an array of any dtype and shape as its bytes, [n] uint8, without a copy."""
    return np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)


def identity_bytes(identity: Any) -> bytes:
    """Returns a digest, [8] bytes, by which clusters compare their batches of a step.

    >>> identity_bytes(np.int32([7, 8])) == identity_bytes([7, 8])
    True

    `identity` is what both know the batch by: its number, the numbers of its examples,
    or a text; None, whose digest is zeros, if they know it by nothing, and all compares
    equal.
    """
    if identity is None:
        return bytes(frames.IDENTITY_BYTES)
    is_text = isinstance(identity, str)
    data = identity.encode() if is_text else np.asarray(identity, np.int64).tobytes()
    return hashlib.blake2b(data, digest_size=frames.IDENTITY_BYTES).digest()
