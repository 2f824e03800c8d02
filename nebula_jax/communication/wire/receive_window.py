"""Received messages, and whether the peer is owed an acknowledgement of them.

Every frame that leaves acknowledges what was received before; where none is due, a Ping
has to.
"""

ACK_BYTES = 1 << 20  # received without an acknowledgement; small against the window
ACK_FRAMES = 64  # likewise: a Ping for every small frame would double their number


class ReceiveWindow:
    """The counts of numbered messages that were received."""

    def __init__(self) -> None:
        self.count = 0
        """Messages of all connections."""
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
