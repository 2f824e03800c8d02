"""The windows of a session: what was sent and received, and what is acknowledged.

Every frame that leaves acknowledges what was received before; where none is due, a Ping
has to.
"""

import collections

from nebula_jax.communication.wire import frames

WINDOW_BYTES = 16 << 20  # not acknowledged; 170 Mbit/s fill it in 0.8 s
WINDOW_TENSORS = 2  # however large: one on its way while the other is acknowledged
WINDOW_FRAMES = 4096  # however small
ACK_BYTES = 1 << 20  # received without an acknowledgement; small against the window
ACK_FRAMES = 64  # likewise: a Ping for every small frame would double their number


class SendWindow:
    """The numbered messages that are kept until they are acknowledged.

    acknowledged <= cursor <= next_sequence: the peer has all before `acknowledged`; on
    the present connection all before `cursor` were handed out.
    """

    def __init__(self) -> None:
        self.reserved = 0  # bytes of tensors that may wait although the window is full
        self.most_tensors = self.most_bytes = 0
        """The most that waited for a line that was down, or beyond a full window."""
        self.acknowledged = self.cursor = self.next_sequence = 0
        self._ever_sent = 0
        self._messages: collections.deque[frames.Message] = collections.deque()
        self._tensors = self._bytes = 0

    @property
    def can_send(self) -> bool:
        """True if the window takes one more tensor, without the reserved bytes."""
        return self.next_sequence - self.acknowledged < WINDOW_FRAMES and (
            self._tensors < WINDOW_TENSORS or self._bytes < WINDOW_BYTES
        )

    def has_room(self, size: int, tensors: int = 1) -> bool:
        """Returns True if tensors of `size` bytes together may be sent now.

        Of several, all but the first need reserved bytes.
        """
        waiting = self.next_sequence - self.acknowledged
        fits = self._bytes + size <= self.reserved
        return waiting + tensors <= WINDOW_FRAMES and (self.can_send or fits)

    def note_waiting(self) -> None:
        """Records how much waits for a line that is down."""
        self.most_tensors = max(self.most_tensors, self._tensors)
        self.most_bytes = max(self.most_bytes, self._bytes)

    @property
    def is_empty(self) -> bool:
        """True if the peer has all that was sent."""
        return self.acknowledged == self.next_sequence

    def drop(self) -> None:
        """Frees what was not acknowledged: nothing is sent any more; counts stay."""
        self._messages.clear()
        self._tensors = self._bytes = 0

    @property
    def is_pending(self) -> bool:
        """True if a message waits to be handed out."""
        return self.cursor < self.next_sequence

    def add(self, message: frames.Message) -> None:
        """Appends a message; its number is `next_sequence` before the call."""
        is_full = not self.can_send
        self._messages.append(message)
        self.next_sequence += 1
        if type(message) is frames.Tensor:
            self._tensors += 1
            self._bytes += frames.tensor_bytes(message)
            if is_full:
                self.note_waiting()

    def next(self) -> frames.Message:
        """Hands out the next message; its number is `cursor` before the call."""
        message = self._messages[self.cursor - self.acknowledged]
        self.cursor += 1
        self._ever_sent = max(self._ever_sent, self.cursor)
        return message

    def rewind(self) -> None:
        """Starts a new connection: what is not acknowledged is sent again."""
        self.cursor = self.acknowledged

    def acknowledge(self, count: int) -> None:
        """Drops what the peer has: `count` numbered messages, in all.

        Raises frames.FrameError if it cannot have so many, or has had more before.
        """
        if count == self.acknowledged:
            return
        if not self.acknowledged < count <= self._ever_sent:
            raise frames.FrameError(
                f"acknowledged {count} frames; it had acknowledged"
                f" {self.acknowledged}, and {self._ever_sent} were sent"
            )
        for _ in range(count - self.acknowledged):
            message = self._messages.popleft()
            if type(message) is frames.Tensor:
                self._tensors -= 1
                self._bytes -= frames.tensor_bytes(message)
        self.acknowledged = count
        self.cursor = max(self.cursor, count)


class ReceiveWindow:
    """The counts of numbered messages that were received."""

    def __init__(self) -> None:
        self.count = 0  # messages of all connections
        self.unacknowledged = self._unacknowledged_bytes = 0

    def add(self, nbytes: int) -> None:
        """Counts a message whose frame has so many bytes."""
        self.count += 1
        self.unacknowledged += 1
        self._unacknowledged_bytes += nbytes

    def acknowledge(self) -> int:
        """Returns the count, for a frame that leaves: nothing is owed then."""
        self.unacknowledged = self._unacknowledged_bytes = 0
        return self.count

    @property
    def is_due(self) -> bool:
        """True if the peer has waited long enough for an acknowledgement."""
        return (
            self.unacknowledged >= ACK_FRAMES or self._unacknowledged_bytes >= ACK_BYTES
        )
