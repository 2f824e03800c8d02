"""A clock that a test moves, in place of `time.monotonic`."""


class Clock:
    """Tells `now`, in seconds."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
