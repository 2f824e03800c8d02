"""Fair shares of a line: which stream sends next.

Accounts share the line by their weights, and the streams of an account share what it
gets. Each has a clock that runs by the bytes it has sent, over its weight; who has data
and the earliest clock is next. Who was idle gains nothing by it.
"""

import collections
from collections.abc import Hashable


class _Queue:
    """The data that one stream has to send."""

    def __init__(self, account: "_Account") -> None:
        self.account, self.clock = account, 0.0
        self.chunks: collections.deque[bytes] = collections.deque()
        self.is_ending = False


class _Account:
    """The streams of one account."""

    def __init__(self, weight: float) -> None:
        self.weight, self.clock = weight, 0.0
        self.ready: dict[Hashable, _Queue] = {}  # streams that have data
        self.now = 0.0  # the clock of the stream that was last to send


class Shares:
    """The streams of one line, and their turns."""

    def __init__(self) -> None:
        """Starts without streams."""
        self._queues: dict[Hashable, _Queue] = {}
        self._accounts: dict[str, _Account] = {}
        self._now = 0.0

    def __contains__(self, stream: Hashable) -> bool:
        return stream in self._queues

    def add(self, stream: Hashable, account: str, weight: float) -> None:
        """Adds a new stream of an account, whose weight is above 0."""
        owner = self._accounts.setdefault(account, _Account(weight))
        owner.weight = weight
        self._queues[stream] = _Queue(owner)

    def remove(self, stream: Hashable) -> None:
        """Removes a stream, and what it had to send."""
        queue = self._queues.pop(stream, None)
        if queue is not None:
            queue.account.ready.pop(stream, None)

    def remove_when_empty(self, stream: Hashable) -> None:
        """Removes a stream once it has sent what it has."""
        queue = self._queues.get(stream)
        if queue is not None:
            queue.is_ending = True
            if not queue.chunks:
                self.remove(stream)

    def put(self, stream: Hashable, data: bytes) -> None:
        """Queues data of a stream; none of one that was removed."""
        queue = self._queues.get(stream)
        if queue is None:
            return
        account = queue.account
        if not account.ready:
            account.clock = max(account.clock, self._now)
        if not queue.chunks:
            queue.clock = max(queue.clock, account.now)
            account.ready[stream] = queue
        queue.chunks.append(data)

    def next(self) -> bytes | None:
        """Returns data of the stream whose turn it is; None if there are none."""
        active = [each for each in self._accounts.values() if each.ready]
        if not active:
            return None
        account = min(active, key=lambda each: each.clock)
        stream = min(account.ready, key=lambda each: account.ready[each].clock)
        queue = account.ready[stream]
        data = queue.chunks.popleft()
        self._now, account.now = account.clock, queue.clock
        account.clock += len(data) / account.weight
        queue.clock += len(data)
        if not queue.chunks:
            del account.ready[stream]
            if queue.is_ending:
                self.remove(stream)
        return data
