"""Fair shares of a line: which stream sends next.

Accounts share the line by their weights, and the streams of an account take turns. Each
account has a clock that runs by the bytes it has sent, over its weight; who has data
and the earliest clock is next. Who was idle gains nothing by it.
"""

import collections
from collections.abc import Hashable


class _Account:
    """The streams of one account."""

    def __init__(self) -> None:
        self.weight, self.clock = 1.0, 0.0
        self.ready: dict[Hashable, collections.deque[bytes]] = {}
        """Stream -> its data, if it has any; whose turn it is first."""


class Shares:
    """The streams of one line, and their turns."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._owners: dict[Hashable, _Account] = {}
        self._ending: set[Hashable] = set()
        self._now = 0.0

    def __contains__(self, stream: Hashable) -> bool:
        return stream in self._owners

    def add(self, stream: Hashable, account: str, weight: float) -> None:
        """Adds a new stream of an account, whose weight is above 0."""
        self._owners[stream] = owner = self._accounts.setdefault(account, _Account())
        owner.weight = weight

    def remove(self, stream: Hashable) -> None:
        """Removes a stream, and what it had to send."""
        self._ending.discard(stream)
        if (owner := self._owners.pop(stream, None)) is not None:
            owner.ready.pop(stream, None)

    def remove_when_empty(self, stream: Hashable) -> None:
        """Removes a stream once it has sent what it has."""
        if stream in self._owners[stream].ready:
            self._ending.add(stream)
        else:
            self.remove(stream)

    def put(self, stream: Hashable, data: bytes) -> None:
        """Queues data of a stream; none of one that was removed."""
        if (owner := self._owners.get(stream)) is not None:
            if not owner.ready:
                owner.clock = max(owner.clock, self._now)
            owner.ready.setdefault(stream, collections.deque()).append(data)

    def next(self) -> bytes | None:
        """Returns data of the stream whose turn it is; None if there are none."""
        active = [each for each in self._accounts.values() if each.ready]
        if not active:
            return None
        account = min(active, key=lambda each: each.clock)
        stream = next(iter(account.ready))
        chunks = account.ready.pop(stream)
        data, self._now = chunks.popleft(), account.clock
        account.clock += len(data) / account.weight
        if chunks:
            account.ready[stream] = chunks  # behind the others
        elif stream in self._ending:
            self.remove(stream)
        return data
