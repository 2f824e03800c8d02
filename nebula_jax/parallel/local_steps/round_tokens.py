"""The tokens that a cluster's messages of rounds report, counted for each fragment."""

from collections.abc import Sequence
from typing import Any

import jax


class Tokens:
    """The tokens of a cluster's inner steps since its latest message of each fragment.

    A message takes them along. Those of one that a round goes on without come back.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        """Begins where no message is under way, as whenever a checkpoint is saved.

        Args:
          counts: P, of each fragment until now.
        """
        self._counts = list(counts)
        self._sent = [0] * len(self._counts)  # with a message that is under way
        self._steps: list[Any] = []  # perhaps still being computed

    def took(self, tokens: Any) -> None:
        """Counts those of an inner step, [] integers on any device."""
        self._steps.append(tokens)

    def counts(self) -> list[int]:
        """Returns those of each fragment until now, P; waits for steps under way."""
        tokens = sum(int(each) for each in jax.device_get(self._steps))
        self._steps.clear()
        self._counts = [each + tokens for each in self._counts]
        return list(self._counts)

    def send(self, fragment: int) -> int:
        """Returns those that a fragment's message takes along."""
        tokens = self.counts()[fragment]
        self._counts[fragment], self._sent[fragment] = 0, tokens
        return tokens

    def close(self, fragment: int, is_in: bool, kept: float) -> None:
        """Counts for the next round what the parameters still have of a closed one.

        Args:
          fragment: of the round.
          is_in: True if this cluster's message is in it.
          kept: share of what the parameters had learned that they keep without it.
        """
        sent, self._sent[fragment] = self._sent[fragment], 0
        if not is_in:
            tokens = self.counts()[fragment] + sent
            self._counts[fragment] = round(tokens * kept)
