"""The messages that came to a link: tensors in queues, of control ones the latest."""

import collections
import threading

from nebula_jax.communication.wire import frames

MAX_TENSORS = 4  # enough that the line never waits for the reader,
MAX_BYTES = 1 << 20  # or more of them if they are small together
FLOOD_BYTES = 64 << 20  # while a caller waits for something else: too much
TENSOR_OVERHEAD = 512  # bytes of memory that a tensor takes besides its buffers


class ReceiveQueue:
    """A queue for each channel, and a common bound on what waits in them."""

    def __init__(self) -> None:
        self.waiting: list[str] = []  # what for, of each caller that waits
        self.is_closed = False  # True if no receiver takes more: what comes is dropped
        self._queues: list[collections.deque[frames.Tensor]] = []
        self._lock = threading.Lock()  # guards the two below
        self.tensors = self._bytes = 0

    def add_channel(self) -> None:
        """Adds a queue; channels count from 0."""
        self._queues.append(collections.deque())

    def put(self, message: frames.Tensor) -> None:
        """Appends a tensor to the queue of its channel."""
        if not self.is_closed:
            self._count(1, message)
            self._queues[message.channel].append(message)

    def take(self, channel: int) -> frames.Tensor:
        """Returns the next tensor of a channel, which must be there."""
        message = self._queues[channel].popleft()
        self._count(-1, message)
        return message

    def next(self, channel: int) -> frames.Tensor | None:
        """Returns the next tensor of a channel, which stays; None if none is there."""
        queue = self._queues[channel]
        return queue[0] if queue else None

    def has_room(self) -> bool:
        """Returns True if more may be read."""
        if self.is_closed or self.tensors < MAX_TENSORS:
            return True
        return self._bytes < (FLOOD_BYTES if self.waiting else MAX_BYTES)

    def _count(self, sign: int, message: frames.Tensor) -> None:
        size = frames.tensor_bytes(message) + TENSOR_OVERHEAD
        with self._lock:
            self.tensors += sign
            self._bytes += sign * size


class ControlMessages:
    """The latest control messages of a peer: those that are no tensors."""

    def __init__(self) -> None:
        self.welcome: int | None = None  # the step of its Welcome, once that has come
        self.formats = b""  # the description of its channels that came with it
        self.step_done = 0  # the step of its latest token
        self.stop: int | None = None  # the step of its last Stop
        self.has_ended = False  # True once it has sent End

    def take(self, message: frames.Message) -> None:
        """Takes a control message of the peer."""
        match message:
            case frames.End():
                self.has_ended = True
            case frames.StepDone(step=step):
                self.step_done = max(self.step_done, step)
            case frames.Stop(step=step):
                self.stop = step
            case frames.Welcome(step=step, channels=described):
                self.formats = described
                self.welcome = self.step_done = step
