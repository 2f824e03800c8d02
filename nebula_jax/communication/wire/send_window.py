"""What one side of a session has said, and the other has not yet taken."""

import collections

from nebula_jax.communication.wire import frames

WINDOW_BYTES = 16 << 20  # not yet taken; 170 Mbit/s fill it in 0.8 s
WINDOW_TENSORS = 2  # however large: one on its way while the other is acknowledged
WINDOW_FRAMES = 4096  # however small


class Outgoing:
    """Numbered messages, kept until they are acknowledged.

    acked <= cursor <= said: the peer has taken all before `acked`; on the present
    connection all before `cursor` were handed out; the next message gets number `said`.
    """

    def __init__(self):
        self.acked = self.cursor = self.said = 0
        self._ever_sent = 0
        self._messages: collections.deque[frames.Message] = collections.deque()
        self._tensors = self._bytes = 0

    @property
    def has_window(self) -> bool:
        """Whether one more tensor may be said before the peer has taken others."""
        return self.said - self.acked < WINDOW_FRAMES and (
            self._tensors < WINDOW_TENSORS or self._bytes < WINDOW_BYTES
        )

    def add(self, message: frames.Message) -> None:
        """Says something."""
        self._messages.append(message)
        self.said += 1
        if type(message) is frames.Tensor:
            self._tensors += 1
            self._bytes += frames.tensor_bytes(message)

    def next(self) -> frames.Message:
        """What to send next; its number is `cursor` before the call."""
        message = self._messages[self.cursor - self.acked]
        self.cursor += 1
        if self.cursor > self._ever_sent:
            self._ever_sent = self.cursor
        return message

    def rewind(self) -> None:
        """A new connection: what was not taken is sent again."""
        self.cursor = self.acked

    def take_ack(self, taken: int) -> None:
        """Drops what the peer has taken.

        Raises:
          ValueError: if it cannot have taken so much, or said more before.
        """
        if taken == self.acked:
            return
        if not self.acked < taken <= self._ever_sent:
            raise ValueError(
                f"has taken {taken} frames; it said {self.acked} before,"
                f" and {self._ever_sent} were sent"
            )
        for _ in range(taken - self.acked):
            message = self._messages.popleft()
            if type(message) is frames.Tensor:
                self._tensors -= 1
                self._bytes -= frames.tensor_bytes(message)
        self.acked = taken
        if self.cursor < taken:
            self.cursor = taken
