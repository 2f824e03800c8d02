"""The rounds of local steps in a loop: what is due after each inner step.

    of_run = rounds.LocalRounds([member], exchange)
    for step in ...:
        state, metrics = train_step(state, batch)
        [params], heads = of_run.after(step, [state.params])
    [params] = of_run.finish(step, [params])    # after the last step of the run

While a message is in flight the cluster takes further inner steps. One process may have
the members of all clusters; then nothing is sent.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax

from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication.selector import Selected
from nebula_jax.parallel.local_steps import member as member_lib
from nebula_jax.parallel.local_steps import messages
from nebula_jax.training import diloco

Now = Callable[[], tuple[int, bool]]
"""Returns the milliseconds that the run has lasted here, and True to request its end.
"""


def no_news() -> tuple[int, bool]:
    """Returns what a run without a time has to report, unless its end is requested."""
    return 0, False


class Ends(Protocol):
    """The channels to the other clusters: `exchange.Exchange`, or `quorum.hub.Hub`."""

    def send(self, step: int, fragment: int, message: Selected) -> None:
        """Sends this cluster's message of a round to all others."""

    def poll(self, step: int, fragment: int) -> None:
        """Takes those messages of a round that have arrived; waits for none."""

    def receive(
        self, step: int, fragment: int, message: Selected
    ) -> Sequence[Selected | None]:
        """Waits for a round's messages, in the clusters' order; None for no message."""


class Rounds(Protocol):
    """A cluster's part in the rounds: of `LocalRounds`, or of an end with a quorum."""

    @property
    def step(self) -> int:
        """The step at which the cluster is; after `after` it may be a later one."""

    @property
    def described(self) -> dict[str, Any]:
        """The figures of a cluster's rounds for its summary, as JSON values."""

    def after(
        self, step: int, params: Sequence[Any], now: Now = no_news
    ) -> tuple[list[Any], list[messages.Head]]:
        """Sends what is to be sent after an inner step, and applies what is due."""

    def finish(self, step: int, params: Sequence[Any]) -> list[Any]:
        """Takes a last round of every fragment, and ends at the anchors."""


def last_rounds(config: diloco.Config, step: int) -> list[tuple[int, int]]:
    """Returns the rounds that are still to be applied after the last step of a run.

    The one that is in flight, if any; then one of every other fragment.

    >>> last_rounds(diloco.Config(inner_steps=8, fragments=4, delay=1), 8)
    [(8, 0), (8, 1), (8, 2), (8, 3)]

    Args:
      config: of the run.
      step: its last one.

    Returns:
      Steps after which the messages are sent, and the fragments.
    """
    in_flight = [
        (step - ago, fragment)
        for ago in range(config.delay)
        if (fragment := config.sent_after(step - ago)) is not None
    ]
    done = config.sent_after(step)
    rest = [(step, each) for each in range(config.fragments) if each != done]
    return in_flight + rest


class LocalRounds:
    """The rounds of the clusters of this process, with all others."""

    def __init__(
        self,
        members: Sequence[member_lib.Member],
        ends: Ends | None = None,
    ) -> None:
        """Begins before the first step, or where no message is in flight.

        Args:
          members: this cluster's; or those of all clusters, in their order.
          ends: the channels to the other clusters; None if there are none.
        """
        self.members = list(members)
        """The parts in the rounds of the clusters of this process."""
        self._ends = ends
        self._config = members[0].config
        self.step = 0
        """The step after which `after` was last called."""
        self._own: list[Selected] = []  # the payloads that were sent last
        self._messages = self._message_bytes = 0

    def after(
        self,
        step: int,
        params: Sequence[Any],
        now: Now = no_news,
    ) -> tuple[list[Any], list[messages.Head]]:
        """Sends what is to be sent after an inner step, and applies what is due.

        Args:
          step: just taken, counted from 1.
          params: after it, those that train, of each cluster of this process.
          now: called if a message is sent.

        Returns:
          The parameters, and the heads of the round that was applied, if any.

        Raises:
          member_lib.RoundError: if a message cannot be of this round.
        """
        self.step = step
        fragment = self._config.sent_after(step)
        if fragment is not None:
            self._send(step, fragment, params, *now())
        sent = step - self._config.delay
        fragment = self._config.applied_after(step)
        if fragment is not None:
            return self._apply(sent, fragment, params)
        if self._ends is not None:
            self._ends.poll(*self._config.next_sent(max(1, sent + 1)))
        return list(params), []

    def finish(self, step: int, params: Sequence[Any]) -> list[Any]:
        """Takes a last round of every fragment, and ends at the anchors.

        Args:
          step: the last one of the run.
          params: after it, of each cluster of this process.

        Raises:
          member_lib.RoundError: as `after`; and if clusters come to different anchors.
        """
        self.step = step
        for sent, fragment in last_rounds(self._config, step):
            if sent == step and fragment != self._config.sent_after(step):
                self._send(step, fragment, params)
            params, _ = self._apply(sent, fragment, params)
        end = self._config.fragments
        self._own = [member.closing(step) for member in self.members]
        if self._ends is not None:
            self._ends.send(step, end, self._own[0])
        received = self._receive(step, end)
        return [
            member.close(step, own, received)
            for member, own in zip(self.members, params, strict=True)
        ]

    def _send(
        self,
        step: int,
        fragment: int,
        params: Sequence[Any],
        milliseconds: int = 0,
        is_stopping: bool = False,
    ) -> None:
        self._own = [
            member.outgoing(step, fragment, own, milliseconds, is_stopping)
            for member, own in zip(self.members, params, strict=True)
        ]
        self._messages += 1
        self._message_bytes += codec_lib.nbytes(self._own[0])
        if self._ends is not None:
            self._ends.send(step, fragment, self._own[0])

    def _receive(self, step: int, fragment: int) -> Sequence[Selected | None]:
        """Returns the payloads of all clusters, in their order."""
        if self._ends is None:
            return self._own
        return self._ends.receive(step, fragment, self._own[0])

    def _apply(
        self, step: int, fragment: int, params: Sequence[Any]
    ) -> tuple[list[Any], list[messages.Head]]:
        received = self._receive(step, fragment)
        applied: list[Any] = []
        heads: list[messages.Head] = []
        for member, own in zip(self.members, params, strict=True):
            after, heads = member.incoming(step, fragment, own, received)
            applied.append(after)
        return applied, heads

    @property
    def described(self) -> dict[str, Any]:
        """The figures of a cluster's rounds for its summary, as JSON values.

        Its messages and the bytes of their payloads, each of which goes to every other
        cluster; and the parameters that train.
        """
        specs = jax.tree.leaves([spec["delta"] for spec in self.members[0].specs])
        return {
            "messages": self._messages,
            "message_bytes": self._message_bytes,
            "parameters": sum(math.prod(leaf.shape) for leaf in specs),
        }
