"""A leaf of rounds with a quorum: it follows what the hub decides.

    end = leaf.Leaf(member, clusters, own, link)
    start = end.begin(timeout)               # waits for the hub's Welcome
    for step in steps:
        [params], heads = end.after(step, [params])
        step = end.step                      # later if it was late, and skips some
    [params] = end.finish(step, [params])

It has a message in a round if it comes to the step before the verdict does. Else it
applies the round at once without one, and resumes where the hub was then.

R clusters, P fragments.
"""

import collections
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from nebula_jax.communication import channels
from nebula_jax.communication.link import Link
from nebula_jax.communication.selector import Selected
from nebula_jax.communication.wire import frames
from nebula_jax.parallel.local_steps import member as member_lib
from nebula_jax.parallel.local_steps import messages, quorum, rounds
from nebula_jax.parallel.local_steps.messages import Key
from nebula_jax.training import diloco


class Leaf:
    """A leaf's part in the rounds."""

    def __init__(
        self,
        member: member_lib.Member,
        clusters: Sequence[str],
        own: str,
        link: Link,
        last: int = frames.MAX_STEP,
    ) -> None:
        """Opens the channels; there is no step after `last`."""
        self._member, self._config = member, member.config
        self._number = list(clusters).index(own)
        self._own, self._link, self._hub = own, link, link.peer.cluster
        self._log = _Log(member, clusters, own, link, last)
        self._up = quorum.open_up(link.sender, member, own)
        self._closed = [0] * self._config.fragments  # step of the latest round of each
        self._sent: tuple[Key, Selected] | None = None
        self._needs_state = self._has_requested = False
        self._missed = self._from_state = 0
        self.step = 0  # at which this cluster is

    def begin(self, timeout: float, saved: Sequence[int] = ()) -> int:
        """Waits for the hub's Welcome, and for the state of the run if it has begun.

        It waits `timeout` seconds for the Welcome; `saved` are the steps in this
        cluster's Hello. Returns the step that the run resumes after: the newest
        checkpoint up to it is to be restored; the first `after` then takes the state
        that has come. Raises member_lib.RoundError if that step is not saved here, and
        no state has come.
        """
        start = self._link.wait_for_welcome(timeout)
        if start == quorum.IN_FLIGHT:
            self._needs_state = True
            while not self._log.entries:
                self._wait("the state of the run")
            if not self._log.entries[0].verdict.is_state:
                raise member_lib.RoundError(
                    f"{self._hub} closed a round without the state of the run, which"
                    f" {self._own} waits for"
                )
            start = self._log.entries[0].verdict.after
        elif start in (0, *saved):
            self._closed = [start] * len(self._closed)
        else:
            have = ", ".join(map(str, saved)) or "none"
            raise member_lib.RoundError(
                f"{self._hub} resumes after step {start}; {self._own} has {have}"
            )
        self.step = start
        return start

    def after(
        self,
        step: int,
        params: Sequence[Any],
        is_requested: rounds.Requested = rounds.no_request,
    ) -> tuple[list[Any], list[messages.Head]]:
        """Sends and applies what is due after an inner step; see `LocalRounds`.

        Several rounds may be due, their heads in order: `self.step` is then the hub's
        in the last one. Raises quorum.LeftOut if the hub has ended the run without this
        cluster, member_lib.RoundError if a message cannot be of its round.
        """
        self.step = step
        (own,), heads = params, []
        self._request_end(is_requested)
        is_there = self._log.receive()
        while self._is_due():
            own, more = self._apply(own)
            heads += more
        if self.step > step:
            return [own], heads
        if not is_there and not self._log.entries:
            raise self._left_out()
        fragment = self._config.sent_after(step)
        if fragment is not None and step > self._closed[fragment]:
            self._send((step, fragment), own, is_requested)
        fragment, sent = self._config.applied_after(step), step - self._config.delay
        while fragment is not None and sent > self._closed[fragment]:
            while not self._log.entries:
                self._wait(f"the verdict on the round of step {sent}")
            if self._is_end():
                raise self._left_out()
            own, more = self._apply(own)
            heads += more
        return [own], heads

    def finish(self, step: int, params: Sequence[Any]) -> list[Any]:
        """Takes the last rounds, by quorum too, and ends at the anchors.

        Raises as `after`; member_lib.RoundError also if clusters come to other anchors.
        """
        self.step = step
        (own,) = params
        last = self._config.last_rounds(step)
        last.append((step, self._config.fragments))
        while True:
            self._log.receive()
            while not self._log.entries:
                self._send_next(last, own)
                self._wait(f"the verdict on a round of step {step}")
            if self._is_end():
                return [self._close(own)]
            own, _ = self._apply(own)

    @property
    def described(self) -> dict[str, Any]:
        """The figures of `Member`; rounds missed, and times it took the run's state."""
        own = {"missed": self._missed, "from_state": self._from_state}
        return self._member.described | own

    # The log.

    def _wait(self, what: str) -> None:
        """Waits for more of the log; raises quorum.LeftOut if there is no more."""
        if not self._link.wait_for_any(what):
            raise self._left_out()
        self._log.receive()

    def _is_end(self) -> bool:
        return self._log.entries[0].verdict.fragment == self._config.fragments

    def _is_due(self) -> bool:
        """Returns True if the next entry is to be applied, whatever this cluster does.

        Not the round that it has sent a message for and applies later, unless the hub
        is a round further.
        """
        entries = self._log.entries
        if not entries or self._is_end():
            return False
        is_own = self._sent is not None and self._sent[0] == entries[0].verdict[2:4]
        return not is_own or len(entries) > 1

    def _apply(self, params: Any) -> tuple[Any, list[messages.Head]]:
        """Applies the next entry of the log."""
        entry = self._log.entries.popleft()
        if entry.verdict.is_state:
            return self._take_state(params, entry), []
        _, after, step, fragment, version, is_last = entry.verdict
        follows, _ = self._config.next_sent(1 + max(self._closed))
        if step != follows and not is_last:
            raise member_lib.RoundError(
                f"{self._hub} closed the round of step {step}, where that of step"
                f" {follows} follows"
            )
        own_version = self._member.versions[fragment]
        if version != own_version:
            raise member_lib.RoundError(
                f"the hub closed the round of step {step} at version {version} of"
                f" fragment {fragment}; {self._own} has version {own_version}"
            )
        payloads = self._payloads(entry)
        params, heads = self._member.incoming(step, fragment, params, payloads)
        self._closed[fragment], self._sent = step, None
        self.step = max(self.step, after)
        self._log.forget(self._closed)
        return params, [] if is_last else heads

    def _payloads(self, entry: quorum.Entry) -> list[Selected | None]:
        """Returns R payloads of a round; counts it if this cluster is not in it."""
        if self._sent is not None:
            self._log.add_own(*self._sent)
        payloads = self._log.payloads(entry)
        self._missed += payloads[self._number] is None
        return payloads

    def _take_state(self, params: Any, entry: quorum.Entry) -> Any:
        """Goes on from the state of the run, unless nothing of it was missed."""
        states = self._log.states(entry)
        versions = [int(state["about"][0]) for state in states]
        if versions == self._member.versions and not self._needs_state:
            return params
        outers = [
            jax.tree.map(_placed, state["outer"], outer)
            for state, outer in zip(states, self._member.outers, strict=True)
        ]
        self._member.resume(
            {"outers": outers, "codecs": self._member.codecs}, {"versions": versions}
        )
        for outer in outers:
            params = diloco.replace(params, jax.tree.map(jnp.copy, outer.anchor))
        self._closed = [int(state["about"][1]) for state in states]
        self._sent, self._needs_state = None, False
        self._from_state += 1
        self.step = max(self.step, entry.verdict.after)
        self._log.forget(self._closed)
        return params

    def _close(self, params: Any) -> Any:
        entry = self._log.entries.popleft()
        return self._member.close(entry.verdict.step, params, self._payloads(entry))

    def _left_out(self) -> quorum.LeftOut:
        return quorum.LeftOut(
            f"the run has ended without {self._own}, which was too far behind at step"
            f" {self.step}: it has no state of the end, and writes no model"
        )

    # What this cluster sends.

    def _request_end(self, is_requested: rounds.Requested) -> None:
        """Requests the end once, on the link: late messages are in no round."""
        if not self._has_requested and is_requested():
            self._link.stop()
            self._has_requested = True

    def _send(self, key: Key, params: Any, is_requested: rounds.Requested) -> None:
        step, fragment = key
        message = self._member.outgoing(step, fragment, params, is_requested())
        self._put(key, message)

    def _send_next(self, last: Sequence[Key], params: Any) -> None:
        """Sends the message of the first of the last rounds that is not closed yet."""
        is_open = [
            key
            for key in last
            if key[1] == self._config.fragments or key[0] > self._closed[key[1]]
        ]
        key = is_open[0]
        if self._sent is not None and self._sent[0] == key:
            return
        if key[1] == self._config.fragments:
            self._put(key, self._member.closing(key[0]))
        else:
            self._send(key, params, rounds.no_request)

    def _put(self, key: Key, message: Selected) -> None:
        step, fragment = key
        self._sent = key, message
        self._up[fragment].send_payload(step, message)


def _placed(array: Any, like: jax.Array) -> jax.Array:
    """Returns a copy of an array on the devices where another one is."""
    return jax.device_put(jnp.array(array), like.sharding)


class _Log:
    """The entries of the log that a leaf has yet to apply, and what came with them."""

    def __init__(
        self,
        member: member_lib.Member,
        clusters: Sequence[str],
        own: str,
        link: Link,
        last: int,
    ) -> None:
        """Opens the channels; the arguments are those of `Leaf`."""
        self._config, self._clusters, self._own = member.config, list(clusters), own
        self._link, self._hub, self._last = link, link.peer.cluster, last
        self._down: quorum.Down[channels.Receiver] = quorum.open_down(
            link.receiver, member, clusters
        )
        self.entries: collections.deque[quorum.Entry] = collections.deque()
        """Those that are yet to be applied, the oldest first."""
        self._deltas: dict[tuple[str, Key], Selected] = {}
        self._states: list[collections.deque[Any]] = [
            collections.deque() for _ in self._down.states
        ]

    def receive(self) -> bool:
        """Takes all that has arrived; returns False if no more can come."""
        is_there = not self._link.control.has_ended
        # Verdicts first: what comes with one has come before it.
        for arrays in _all_of(self._down.verdicts):
            entry = quorum.entry_of_arrays(arrays)
            try:
                quorum.check(entry.verdict, self._config, self._last)
            except ValueError as error:
                raise member_lib.RoundError(
                    f"{self._hub} sent a verdict that cannot be: {error}"
                ) from None
            self.entries.append(entry)
        for queue, end in zip(self._states, self._down.states, strict=True):
            queue.extend(_all_of(end))
        for origin, ends in self._down.deltas.items():
            for fragment, end in enumerate(ends):
                while (step := end.next_step) is not None:
                    message = end.recv_payload(step)
                    self._deltas[origin, (step, fragment)] = message
        return is_there

    def add_own(self, key: Key, message: Selected) -> None:
        """Adds a message sent here, unless the hub has sent one back, which counts."""
        self._deltas.setdefault((self._own, key), message)

    def payloads(self, entry: quorum.Entry) -> list[Selected | None]:
        """Returns R payloads of a round, None of those that are not in it."""
        key = entry.verdict.step, entry.verdict.fragment
        is_in = dict(zip(self._clusters, entry.members, strict=True))
        if not is_in[self._hub]:
            raise member_lib.RoundError(
                f"{self._hub} counts no message of its own in the round of step"
                f" {key[0]}"
            )
        for name in self._clusters:
            if is_in[name] and (name, key) not in self._deltas:
                raise member_lib.RoundError(
                    f"the hub counts a message of {name} in the round of step {key[0]}"
                    f" that {self._own} does not have"
                )
        return [
            self._deltas[name, key] if is_in[name] else None for name in self._clusters
        ]

    def states(self, entry: quorum.Entry) -> list[Any]:
        """Returns the states of all fragments that came with an entry, P."""
        if not all(self._states):
            raise member_lib.RoundError(
                f"{self._hub} sent a verdict on states of the run that did not come"
            )
        states = [queue.popleft() for queue in self._states]
        try:
            quorum.check_states(states, entry.verdict.after)
        except ValueError as error:
            raise member_lib.RoundError(
                f"{self._hub} sent a state that cannot be: {error}"
            ) from None
        return states

    def forget(self, closed: Sequence[int]) -> None:
        """Drops messages of the rounds up to the latest one of each fragment, P."""
        self._deltas = {
            (origin, (step, fragment)): payload
            for (origin, (step, fragment)), payload in self._deltas.items()
            if fragment == self._config.fragments or step > closed[fragment]
        }


def _all_of(end: channels.Receiver) -> list[Any]:
    """Returns the arrays of all tensors that have arrived on a channel."""
    found = []
    while (step := end.next_step) is not None:
        found.append(end.recv_payload(step).payload)
    return found
