"""The rounds of local steps in a loop: what is due after each inner step.

    ends = rounds.Exchange(clusters, own, links, member.specs, codec)
    of_run = rounds.LocalRounds([member], ends)
    for step in ...:
        state, metrics = train_step(state, batch)
        [params], heads = of_run.after(step, [state.params])
    [params] = of_run.finish(step, [params])    # after the last step of the run

While a message is in flight the cluster takes further inner steps; what has arrived
meanwhile is taken (`Exchange.poll`). Every cluster has a link to every other one, or
all have one to a hub, a cluster too, which passes on what it receives: either way all
get the same bytes. One process may have the members of all clusters; then nothing is
sent.

R clusters, P fragments.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from nebula_jax.communication import channels, ranks, worker_link
from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication.link import Link
from nebula_jax.communication.selector import Selected
from nebula_jax.parallel.local_steps import member as member_lib
from nebula_jax.parallel.local_steps import messages
from nebula_jax.parallel.local_steps.messages import Key

Requested = Callable[[], bool]  # True requests the end of the run


def no_request() -> bool:
    """Returns False: the run goes on."""
    return False


class Ends(Protocol):
    """The channels to all others, `Exchange` or `quorum.hub.Hub`; None: no message."""

    def send(self, step: int, fragment: int, message: Selected) -> None: ...

    def poll(self, step: int, fragment: int) -> None: ...

    def receive(
        self, step: int, fragment: int, message: Selected
    ) -> Sequence[Selected | None]: ...


class Exchange:
    """The channels between this cluster and all others: one a cluster and fragment."""

    def __init__(
        self,
        clusters: Sequence[str],
        own: str,
        links: Mapping[str, channels.Carrier],
        specs: Sequence[codec_lib.Spec],
        codec: codec_lib.Codec,
        hub: str = "",
    ) -> None:
        """Opens the channels; all clusters in the same order.

        With a `hub`, which passes messages on, `links` are its own, or the one to it.
        """
        self._clusters, self._own, self._is_hub = list(clusters), own, hub == own
        through = links.get(hub)
        is_line = isinstance(through, worker_link.AnyLink)
        self._of_hub = through if is_line else None
        self._taken: dict[str, dict[Key, Selected]] = {name: {} for name in clusters}
        self._senders: dict[tuple[str, str], list[channels.Sender]] = {}
        self._receivers: dict[str, list[channels.Receiver]] = {}
        for peer, link in links.items():
            # Receivers may be opened first or last: only each direction's order counts.
            origins = [own] if not self._is_hub else _without(clusters, peer)
            for origin in origins:
                self._senders[origin, peer] = [
                    link.sender(_name(number, origin), spec, codec)
                    for number, spec in enumerate(specs)
                ]
            origins = [peer] if not hub or self._is_hub else _without(clusters, own)
            for origin in origins:
                self._receivers[origin] = [
                    link.receiver(_name(number, origin), spec, codec)
                    for number, spec in enumerate(specs)
                ]

    def send(self, step: int, fragment: int, message: Selected) -> None:
        """Sends this cluster's message of a round to all others."""
        self._pass_on(self._own, (step, fragment), message)

    def _pass_on(self, origin: str, key: Key, message: Selected) -> None:
        step, fragment = key
        for (whose, _), senders in self._senders.items():
            if whose == origin:
                senders[fragment].send_payload(step, message)

    def poll(self, step: int, fragment: int) -> None:
        """Takes those messages of a round that have arrived; waits for none.

        Others stay: a cluster that is ahead may have sent those of the run's end. With
        several processes a cluster, which would have to agree on what has arrived, this
        does nothing.
        """
        if ranks.count() > 1:
            return
        for origin, receivers in self._receivers.items():
            key = step, fragment
            if self._lacks(origin, key) and receivers[fragment].next_step == step:
                self._take(origin, key)

    def _take_all(self, key: Key) -> bool:
        """Takes what has arrived of a round that is due; returns True if any has."""
        found = [
            origin
            for origin, receivers in self._receivers.items()
            if self._lacks(origin, key) and receivers[key[1]].has_arrived
        ]
        for origin in found:
            self._take(origin, key)
        return bool(found)

    def receive(self, step: int, fragment: int, message: Selected) -> list[Selected]:
        """Waits for all messages of a round: R payloads, in the order of the clusters.

        Raises session.SessionError, and what else a link raises, if one cannot come.
        """
        key = step, fragment
        while missing := [each for each in self._receivers if self._lacks(each, key)]:
            if self._of_hub is None:
                self._take(missing[0], key)
                continue
            # All come over one line, in any order: one left there would block the rest.
            if not self._take_all(key):
                what = f"delta {fragment} of step {step} from {', '.join(missing)}"
                if not self._wait_for_any(what) or not self._take_all(key):
                    # No more comes, or one of another fragment has: raises the reason.
                    self._take(missing[0], key)
        return [
            message if name == self._own else self._taken[name].pop(key)
            for name in self._clusters
        ]

    def _wait_for_any(self, what: str) -> bool:
        """Waits for a message of the hub, in the root; returns False if none comes."""
        is_any = isinstance(self._of_hub, Link) and self._of_hub.wait_for_any(what)
        return bool(ranks.agree(is_any))

    def _lacks(self, origin: str, key: Key) -> bool:
        return key not in self._taken[origin]

    def _take(self, origin: str, key: Key) -> None:
        step, fragment = key
        message = self._receivers[origin][fragment].recv_payload(step)
        self._taken[origin][key] = message
        if self._is_hub:
            self._pass_on(origin, key, message)


class LocalRounds:
    """The rounds of the clusters of this process, with all others."""

    def __init__(
        self, members: Sequence[member_lib.Member], ends: Ends | None = None
    ) -> None:
        """Begins with this cluster's member or all clusters', and nothing in flight."""
        self.members = list(members)  # of the clusters of this process
        self._ends = ends
        self._config = members[0].config
        self.step = 0  # after which `after` was last called
        self._own: list[Selected] = []  # the payloads that were sent last

    def after(
        self, step: int, params: Sequence[Any], is_requested: Requested = no_request
    ) -> tuple[list[Any], list[messages.Head]]:
        """Sends what is due after inner step `step`, from 1; applies what is due.

        `params` are those that train, of each cluster of this process; `is_requested`
        is called if a message is sent. Returns the parameters, and the heads of the
        round that was applied, if any. Raises member_lib.RoundError if a message cannot
        be of it.
        """
        self.step = step
        fragment = self._config.sent_after(step)
        if fragment is not None:
            self._send(step, fragment, params, is_requested())
        sent = step - self._config.delay
        fragment = self._config.applied_after(step)
        if fragment is not None:
            return self._apply(sent, fragment, params)
        if self._ends is not None:
            self._ends.poll(*self._config.next_sent(max(1, sent + 1)))
        return list(params), []

    def finish(self, step: int, params: Sequence[Any]) -> list[Any]:
        """Takes a last round of every fragment, and ends at the anchors.

        Raises member_lib.RoundError as `after`, and if clusters come to different
        anchors.
        """
        self.step = step
        for sent, fragment in self._config.last_rounds(step):
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
        self, step: int, fragment: int, params: Sequence[Any], is_stopping: bool = False
    ) -> None:
        self._own = [
            member.outgoing(step, fragment, own, is_stopping)
            for member, own in zip(self.members, params, strict=True)
        ]
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
        """The figures of a cluster's rounds for its summary; see `Member.described`."""
        return self.members[0].described


def _name(fragment: int, origin: str) -> str:
    return f"delta {fragment} of {origin}"


def _without(clusters: Sequence[str], name: str) -> list[str]:
    return [each for each in clusters if each != name]
