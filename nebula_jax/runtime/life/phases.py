"""The phases of a process until its first step, and the seconds that each took."""

import time
from collections.abc import Callable

from nebula_jax.runtime.life import process

_command: dict[str, float] = {}  # `importing`, seconds, and its end, `since`


def imported() -> None:
    """Records that a command has imported what it needs, and begins its work."""
    _command.update(importing=process.age(), since=time.monotonic())


class Phases:
    """The phases of this process; each is a progress line as it begins."""

    def __init__(
        self, cluster: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begins with `preparing` as `cluster`; of a command, since its imports."""
        self.seconds: dict[str, float] = {}  # by phase, of those that are over
        self._cluster, self._clock = cluster, clock
        self._name, self._since = "preparing", _command.get("since", clock())
        if _command:
            self.seconds["importing"] = _command["importing"]
        self._show()

    def enter(self, name: str) -> None:
        """Ends the present phase, and begins the next one."""
        now = self._clock()
        took = self.seconds.get(self._name, 0.0) + now - self._since
        self.seconds[self._name], self._since = took, now
        self._name = name
        self._show()

    def _show(self) -> None:
        so_far = round(sum(self.seconds.values()), 3)
        process.progress(
            f"{self._cluster:<13} {self._name}",
            {"cluster": self._cluster, "phase": self._name, "seconds": so_far},
        )
