"""The hub of rounds with a quorum: it decides which clusters a round has.

    end = hub.Hub(member, clusters, own, links, rule, rejoined=..., ...)
    end.begin(start)                          # welcomes the leaves; then as LocalRounds

It never waits for a leaf but within a round, and there for a quorum only, and then for
`grace` seconds. A leaf whose line takes no more is sent nothing until it does again;
then it is sent the state of the run, as is one that has rejoined.

R clusters, P fragments.
"""

import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from nebula_jax.communication import bridge, channels
from nebula_jax.communication import link as link_lib
from nebula_jax.communication.link import Link
from nebula_jax.communication.selector import Selected
from nebula_jax.communication.wire import activity, windows
from nebula_jax.parallel.local_steps import member as member_lib
from nebula_jax.parallel.local_steps import messages, quorum, rounds
from nebula_jax.parallel.local_steps.messages import Key

POLL_SECONDS = 0.005  # between looks at what has arrived, while a round waits for more
STATES = 2
"""Sizes of the state for which there is room on a leaf's line: the state itself, and as
many messages, for those that come while it crosses."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """The rule by which a round goes on."""

    quorum: int  # K, the clusters that it needs, the hub included
    grace: float  # seconds that it then waits for the others
    timeout: float  # seconds after which it is an error if fewer than K are there


@dataclasses.dataclass(eq=False)
class _Leaf:
    """A leaf, as the hub has it."""

    name: str
    link: Link
    down: quorum.Down[channels.Sender]
    up: list[channels.Receiver]
    follows: bool = False  # True if it is sent the log: it has had all before


class Hub:
    """The hub's part in the rounds; also its ends of the channels (`Ends`)."""

    def __init__(
        self,
        member: member_lib.Member,
        clusters: Sequence[str],
        own: str,
        links: Mapping[str, Link],
        rule: Rule,
        *,
        rejoined: Callable[[], Link | None] = lambda: None,
        work: activity.Work | None = None,
        log: Callable[[str], None] = print,
    ) -> None:
        """Opens the channels over `links`, to all leaves by name.

        `rejoined` returns the link to a cluster that has rejoined, or None; `log` takes
        a line when a leaf is away, or is back.
        """
        self._rounds = rounds.LocalRounds([member], self)
        self._member, self._clusters, self._own = member, list(clusters), own
        self._rule, self._log = rule, log
        self._rejoined, self._work = rejoined, work or activity.Work()
        self.step = 0  # at which the hub is
        self._is_ending = False
        self._applied = 0  # the step at which the latest round was applied
        self._closed = [0] * len(member.specs)  # step of each fragment's latest round
        self._key: Key | None = None  # of the round for which there was room
        self._taken: dict[str, Selected] = {}  # of that round
        self._without: collections.Counter[str] = collections.Counter()
        self._absent: set[str] = set()  # those that are not in the latest round
        self._few_since: float | None = None
        self._leaves = {name: self._opened(name, link) for name, link in links.items()}

    def _opened(self, name: str, link: Link) -> _Leaf:
        down = quorum.open_down(link.sender, self._member, self._clusters)
        up = quorum.open_up(link.receiver, self._member, name)
        leaf = _Leaf(name, link, down, up)
        most = max(self._round_bytes(leaf, each) for each in range(len(up)))
        states = STATES * quorum.nbytes(down.states)
        link.reserve(states + 2 * most + windows.WINDOW_BYTES)
        return leaf

    def _round_bytes(self, leaf: _Leaf, fragment: int) -> int:
        deltas = [each[fragment] for each in leaf.down.deltas.values()]
        return quorum.nbytes([*deltas, leaf.down.verdicts])

    def begin(self, start: int) -> None:
        """Begins after step `start`; leaves without its checkpoint get the state."""
        self.step = self._applied = start
        self._closed = [start] * len(self._closed)
        for leaf in self._leaves.values():
            leaf.follows = start in (0, *leaf.link.peer.checkpoints)
            self._welcome(leaf, start if leaf.follows else quorum.IN_FLIGHT)

    def _welcome(self, leaf: _Leaf, step: int) -> None:
        with self._unless_ended(leaf):
            leaf.link.welcome(step)

    def after(
        self,
        step: int,
        params: Sequence[Any],
        is_requested: rounds.Requested = rounds.no_request,
    ) -> tuple[list[Any], list[messages.Head]]:
        """Sends and applies what is due after an inner step; see `LocalRounds`.

        Its own messages also have the requests of leaves to end the run. Raises
        quorum.TooFew if fewer clusters than the quorum are left for too long.
        """
        self.step = step

        def is_anywhere() -> bool:
            links = [leaf.link for leaf in self._leaves.values()]
            return is_requested() or any(link.stop_step is not None for link in links)

        return self._rounds.after(step, params, is_anywhere)

    def finish(self, step: int, params: Sequence[Any]) -> list[Any]:
        """Takes the last rounds, by quorum too, and ends at the anchors."""
        self.step, self._is_ending = step, True
        return self._rounds.finish(step, params)

    @property
    def described(self) -> dict[str, Any]:
        """The figures of the rounds: also how many each leaf was not in."""
        return {**self._rounds.described, "without": dict(self._without)}

    # The ends of the channels.

    def send(self, step: int, fragment: int, message: Selected) -> None:
        """Sends the hub's message of a round to all leaves that follow."""
        self._look((step, fragment))
        self._pass_on(self._own, (step, fragment), message)

    def poll(self, step: int, fragment: int) -> None:
        """Takes what has arrived of a round, and passes it on; waits for nothing."""
        self._look((step, fragment))

    def receive(
        self, step: int, fragment: int, message: Selected
    ) -> list[Selected | None]:
        """Returns a closed round's R payloads, None if absent; raises quorum.TooFew."""
        self._gather((step, fragment))
        versions = [*self._member.versions, 0]
        members = tuple(name in self._taken for name in self._clusters)
        verdict = quorum.Verdict(
            is_state=0,
            after=self.step,
            step=step,
            fragment=fragment,
            version=versions[fragment],
            is_last=int(self._is_ending),
        )
        for leaf in self._following():
            self._announce(leaf, quorum.Entry(verdict, members))
        self._count_absent(step)
        self._closed[fragment], self._applied = step, self.step
        taken, self._taken = self._taken, {}
        return [taken.get(name) for name in self._clusters]

    def _count_absent(self, step: int) -> None:
        """Counts those that are not in a round; names those that were in the last."""
        absent = set(self._clusters) - set(self._taken)
        for name in sorted(absent - self._absent):
            self._log(f"the round of step {step} goes on without {name}")
        self._absent = absent
        self._without.update(absent)

    def _leave_out(self, leaf: _Leaf, why: str) -> None:
        """Sends a leaf no more, until it can be sent the state of the run."""
        leaf.follows = False
        self._absent.add(leaf.name)
        self._log(f"rounds go on without {leaf.name}: {why}")

    def _following(self) -> list[_Leaf]:
        return [leaf for leaf in self._leaves.values() if leaf.follows]

    def _announce(self, leaf: _Leaf, entry: quorum.Entry) -> None:
        arrays = quorum.arrays_of_entry(entry)
        message = Selected(arrays)
        self._send(leaf, leaf.down.verdicts, entry.verdict.after, message)

    def _send(
        self, leaf: _Leaf, end: channels.Sender, step: int, message: Selected
    ) -> None:
        with self._unless_ended(leaf):
            end.send_payload(step, message)

    @contextlib.contextmanager
    def _unless_ended(self, leaf: _Leaf) -> Iterator[None]:
        """Makes an error of its link the end of a leaf, not of the run."""
        try:
            yield
        except bridge.ENDED as error:
            self._leave_out(leaf, str(error))
            leaf.link.abort(str(error))

    def _pass_on(self, origin: str, key: Key, message: Selected) -> None:
        step, fragment = key
        self._taken[origin] = message
        for leaf in self._following():
            if leaf.name != origin:
                self._send(leaf, leaf.down.deltas[origin][fragment], step, message)

    def _look(self, key: Key) -> None:
        """Takes what is new: clusters, room on the lines, messages of the round."""
        while (link := self._rejoined()) is not None:
            name = link.peer.cluster
            self._leaves[name] = self._opened(name, link)
            self._welcome(self._leaves[name], quorum.IN_FLIGHT)
        if key != self._key:
            # At the end of a run there may be some of a round that never comes.
            self._key, self._taken = key, {}
            self._find_room(key)
        for leaf in self._leaves.values():
            with self._unless_ended(leaf):
                if not leaf.follows:
                    self._bring(leaf, key)
                self._take(leaf, key)

    def _find_room(self, key: Key) -> None:
        """Leaves out those whose lines do not take the messages of one more round."""
        _, fragment = key
        for leaf in self._following():
            size = self._round_bytes(leaf, fragment)
            if leaf.link.is_over:
                with self._unless_ended(leaf):
                    leaf.link.check("a round")
            elif not leaf.link.has_room(size, tensors=len(self._clusters) + 1):
                self._leave_out(leaf, "it does not take what it is sent")

    def _bring(self, leaf: _Leaf, key: Key) -> None:
        """Sends a leaf the state of the run, once there is room on its line."""
        step, fragment = key
        states = STATES * quorum.nbytes(leaf.down.states)
        size = states + self._round_bytes(leaf, fragment)
        tensors = len(leaf.down.states) + len(self._clusters) + 2
        if leaf.link.is_away or not leaf.link.has_room(size, tensors):
            return
        versions = self._member.versions
        for number, end in enumerate(leaf.down.states):
            state = {
                "about": np.array([versions[number], self._closed[number]], np.uint32),
                "outer": self._member.outers[number],
            }
            end.send_payload(self._applied, Selected(jax.device_get(state)))
        leaf.follows = True
        nobody = (False,) * len(self._clusters)
        verdict = quorum.Verdict(1, self._applied, 0, 0, 0)
        self._announce(leaf, quorum.Entry(verdict, nobody))
        for origin, message in self._taken.items():
            self._send(leaf, leaf.down.deltas[origin][fragment], step, message)
        self._log(f"{leaf.name} is sent the state after step {self._applied}")

    def _take(self, leaf: _Leaf, key: Key) -> None:
        """Takes a leaf's message of a round if it has arrived; drops late ones."""
        for fragment, receiver in enumerate(leaf.up):
            while (step := receiver.next_step) is not None:
                is_late = step <= self._closed[fragment]
                if is_late or (leaf.name in self._taken and (step, fragment) == key):
                    receiver.drop()
                elif (step, fragment) == key:
                    self._pass_on(leaf.name, key, receiver.recv_payload(step))
                else:  # of a later round: the leaf is ahead
                    break

    # What a round waits for.

    def _gather(self, key: Key) -> None:
        """Waits until a quorum is there; then for the others, for a while."""
        what = f"messages of fragment {key[1]} in the round of step {key[0]}"
        self._look(key)
        enough_since: float | None = None

        def is_done() -> bool:
            nonlocal enough_since
            if len(self._taken) < self._rule.quorum:
                self._check_left()
                return False
            now = time.monotonic()
            enough_since = enough_since or now
            return not self._due() or now - enough_since >= self._rule.grace

        self._work.waiting.append(what)
        try:
            while not is_done():
                self._wait_for(self._due()[:1], key, what, is_done)
        finally:
            self._work.waiting.remove(what)
            self._few_since = None

    def _wait_for(
        self, first: list[_Leaf], key: Key, what: str, is_done: Callable[[], bool]
    ) -> None:
        """Waits for a leaf, whose peer has to get something done, or for rejoineds."""
        with contextlib.ExitStack() as stack:
            waits = [stack.enter_context(leaf.link.waiting(what)) for leaf in first]
            while self._due()[:1] == first and not is_done():
                time.sleep(POLL_SECONDS)
                self._look(key)
                for leaf, waiting in zip(first, waits, strict=True):
                    with self._unless_ended(leaf):
                        waiting.check()

    def _due(self) -> list[_Leaf]:
        """Returns the leaves whose messages of the round can still come."""
        return [
            leaf
            for leaf in self._leaves.values()
            if leaf.name not in self._taken and not leaf.link.is_over
        ]

    def _check_left(self) -> None:
        """Raises quorum.TooFew if there has been no quorum for too long."""
        there = [leaf for leaf in self._leaves.values() if not leaf.link.is_away]
        left, now = 1 + len(there), time.monotonic()
        if left >= self._rule.quorum:
            self._few_since = None
            return
        self._few_since = self._few_since or now
        if now - self._few_since >= link_lib.LOST_SECONDS:
            self._work.on_lost("more clusters")
        if now - self._few_since >= self._rule.timeout:
            raise quorum.TooFew(
                f"{left} of {len(self._clusters)} clusters are left, for"
                f" {self._rule.timeout:g} s; a round needs {self._rule.quorum}"
            )
