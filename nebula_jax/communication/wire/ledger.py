"""The byte ledger of a session: what crossed, by direction, kind and channel."""

from nebula_jax.communication.wire import frames

SENT, RECEIVED = "sent", "received"
DAMAGED = "damaged frames"


class Ledger:
    """The frames and bytes that crossed; what is sent again counts again."""

    def __init__(self) -> None:
        self._channels: dict[str, list[str]] = {SENT: [], RECEIVED: []}
        # (direction, name) -> [frames, bytes]
        self._entries: dict[tuple[str, str], list[int]] = {}

    def add_channel(self, direction: str, name: str) -> int:
        """Names the next channel of a direction; returns its number, from 0."""
        self._channels[direction].append(name)
        return len(self._channels[direction]) - 1

    def channel(self, direction: str, number: int) -> str:
        """Returns the name of a channel."""
        return self._channels[direction][number]

    def count(self, direction: str, message: frames.Message, nbytes: int) -> None:
        """Enters the frame of a message; a tensor counts under its channel's name."""
        if type(message) is frames.Tensor:
            name = self.channel(direction, message.channel)
        else:
            name = type(message).__name__
        entry = self._entries.get((direction, name))
        if entry is None:
            entry = self._entries[direction, name] = [0, 0]
        entry[0] += 1
        entry[1] += nbytes

    def count_damage(self) -> None:
        """Enters a frame that arrived damaged; its bytes are not counted."""
        self._entries.setdefault((RECEIVED, DAMAGED), [0, 0])[0] += 1

    def entries(self) -> dict[str, list[int]]:
        """Returns `sent Hello`, `received tokens` and so on -> [frames, bytes]."""
        return {
            f"{direction} {name}": list(entry)
            for (direction, name), entry in list(self._entries.items())
        }
