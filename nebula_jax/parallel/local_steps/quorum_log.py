"""The log of a hub as it arrives at a leaf: what is in it, checked.

    log = quorum_log.Log(member, clusters, own, link, zstd, last)
    is_there = log.receive()                  # False if no more can come
    entry = log.entries.popleft()             # the oldest one
    payloads = log.payloads(entry)            # of the round that it closes
    log.forget(closed)                        # of rounds that are over

R clusters, P fragments.
"""

import collections
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from nebula_jax.communication import channels
from nebula_jax.communication.link import Link
from nebula_jax.communication.selector import Selected
from nebula_jax.parallel.local_steps import quorum, rounds
from nebula_jax.parallel.local_steps.round_messages import Key


class Log:
    """The entries of the log that a leaf has yet to apply, and what came with them."""

    def __init__(
        self,
        member: rounds.Member,
        clusters: Sequence[str],
        own: str,
        link: Link,
        zstd: int | None,
        last: int,
    ) -> None:
        """Opens the channels; the arguments are those of `quorum_leaf.Leaf`."""
        self._config, self._clusters, self._own = member.config, list(clusters), own
        self._link, self._hub, self._last = link, link.peer.cluster, last
        self._down: quorum.Down[channels.Receiver] = quorum.open_down(
            link.receiver, member, clusters, zstd
        )
        self.entries: collections.deque[quorum.Entry] = collections.deque()
        """Those that are yet to be applied, the oldest first."""
        self._deltas: dict[tuple[str, Key], Selected] = {}
        self._states: list[collections.deque[Any]] = [
            collections.deque() for _ in self._down.states
        ]

    def receive(self) -> bool:
        """Takes all that has arrived; returns False if no more can come.

        Raises:
          rounds.RoundError: if a verdict cannot be.
        """
        is_there = not self._link.notices.has_ended
        # Verdicts first: what comes with one has come before it.
        for arrays in _all_of(self._down.verdicts):
            self.entries.append(self._checked(quorum.entry_of_arrays(arrays)))
        for queue, end in zip(self._states, self._down.states, strict=True):
            queue.extend(_all_of(end))
        for origin, ends in self._down.deltas.items():
            for fragment, end in enumerate(ends):
                while (step := end.next_step) is not None:
                    message = end.recv_payload(step)
                    self._deltas[origin, (step, fragment)] = message
        return is_there

    def _checked(self, entry: quorum.Entry) -> quorum.Entry:
        """Returns an entry that the hub can have sent; raises rounds.RoundError."""
        try:
            quorum.check(entry.verdict, self._config, self._last)
        except ValueError as error:
            raise rounds.RoundError(
                f"{self._hub} sent a verdict that cannot be: {error}"
            ) from None
        return entry

    def add_own(self, key: Key, message: Selected) -> None:
        """Adds the message that this leaf has sent of a round.

        The hub may have sent it back: then it is the same, and replaces what came. One
        that differs stays: the process before has sent it, and the round has it.
        """
        came = self._deltas.get((self._own, key))
        if came is None or _is_same(came, message):
            self._deltas[self._own, key] = message

    def payloads(self, entry: quorum.Entry) -> list[Selected | None]:
        """Returns R payloads of a round, None of those that are not in it.

        Raises:
          rounds.RoundError: if one that is in it has not come.
        """
        key = entry.verdict.step, entry.verdict.fragment
        is_in = dict(zip(self._clusters, entry.members, strict=True))
        if not is_in[self._hub]:
            raise rounds.RoundError(
                f"{self._hub} counts no message of its own in the round of step"
                f" {key[0]}"
            )
        for name in self._clusters:
            if is_in[name] and (name, key) not in self._deltas:
                raise rounds.RoundError(
                    f"the hub counts a message of {name} in the round of step {key[0]}"
                    f" that {self._own} does not have"
                )
        return [
            self._deltas[name, key] if is_in[name] else None for name in self._clusters
        ]

    def states(self, entry: quorum.Entry) -> list[Any]:
        """Returns the states of all fragments that came with an entry, P.

        Raises:
          rounds.RoundError: if one has not come, or cannot be.
        """
        if not all(self._states):
            raise rounds.RoundError(
                f"{self._hub} sent a verdict on states of the run that did not come"
            )
        states = [queue.popleft() for queue in self._states]
        try:
            quorum.check_states(states, entry.verdict.after)
        except ValueError as error:
            raise rounds.RoundError(
                f"{self._hub} sent a state that cannot be: {error}"
            ) from None
        return states

    def forget(self, closed: Sequence[int]) -> None:
        """Drops messages of rounds that are over: those that were not in them.

        Args:
          closed: step of the latest round of each fragment, P.
        """
        self._deltas = {
            (origin, (step, fragment)): payload
            for (origin, (step, fragment)), payload in self._deltas.items()
            if fragment == self._config.fragments or step > closed[fragment]
        }


def _is_same(one: Selected, two: Selected) -> bool:
    """Returns True if two messages of one fragment are the same on the line."""
    leaves = [jax.tree.leaves(each.payload) for each in (one, two)]
    return one.option == two.option and all(
        np.array_equal(channels.as_bytes(a), channels.as_bytes(b))
        for a, b in zip(*leaves, strict=True)
    )


def _all_of(end: channels.Receiver) -> list[Any]:
    """Returns the arrays of all tensors that have arrived on a channel."""
    found = []
    while (step := end.next_step) is not None:
        found.append(end.recv_payload(step).payload)
    return found
