"""The exchange of messages among clusters in rounds of local steps.

    ends = exchange.Exchange(clusters, own, links, member.specs, codec)
    ends.send(step, fragment, payload)
    ...                                         # inner steps, meanwhile
    payloads = ends.receive(step, fragment, payload)

Every cluster has a link to every other one, or all have one to a hub, which is a
cluster too and passes on what it receives. Either way all clusters get the same bytes
of every message. While a cluster computes, what has arrived is taken (`poll`), so that
the line never waits for who reads, and a hub passes it on at once.

R clusters, P fragments.
"""

from collections.abc import Mapping, Sequence

from nebula_jax.communication import channels, ranks, selector, worker_link
from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication.link import Link
from nebula_jax.parallel.local_steps.messages import Key


class Exchange:
    """The channels between this cluster and all others: one a cluster and fragment."""

    def __init__(
        self,
        clusters: Sequence[str],
        own: str,
        links: Mapping[str, channels.Carrier],
        specs: Sequence[codec_lib.Spec],
        codec: selector.CodecOrSelector,
        zstd: int | None = None,
        hub: str = "",
    ) -> None:
        """Opens the channels; all clusters in the same order.

        Args:
          clusters: R names.
          own: name of this one.
          links: name -> link; with a hub, its own to all, or the others' to it.
          specs: P, of the messages.
          codec: of the messages.
          zstd: level, or None.
          hub: name of the cluster that passes messages on; empty for none.
        """
        self._clusters, self._own, self._is_hub = list(clusters), own, hub == own
        through = links.get(hub)
        is_line = isinstance(through, Link | worker_link.WorkerLink)
        self._of_hub = through if is_line else None
        self._taken: dict[str, dict[Key, selector.Selected]] = {
            name: {} for name in clusters
        }
        self._senders: dict[tuple[str, str], list[channels.Sender]] = {}
        self._receivers: dict[str, list[channels.Receiver]] = {}
        for peer, link in links.items():
            # Who listens opens its receivers first or last: only the order of each
            # direction counts.
            origins = [own] if not self._is_hub else _without(clusters, peer)
            for origin in origins:
                self._senders[origin, peer] = [
                    link.sender(_name(number, origin), spec, codec, zstd)
                    for number, spec in enumerate(specs)
                ]
            origins = [peer] if not hub or self._is_hub else _without(clusters, own)
            for origin in origins:
                self._receivers[origin] = [
                    link.receiver(_name(number, origin), spec, codec, zstd)
                    for number, spec in enumerate(specs)
                ]

    def send(self, step: int, fragment: int, message: selector.Selected) -> None:
        """Sends this cluster's message of a round to all others.

        Args:
          step: after which it is sent.
          fragment: its number.
          message: its payload.
        """
        self._pass_on(self._own, (step, fragment), message)

    def _pass_on(self, origin: str, key: Key, message: selector.Selected) -> None:
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
        """Takes what has arrived in a round that is due; returns True if there is any.

        Any other message of its fragment is an error.
        """
        found = [
            origin
            for origin, receivers in self._receivers.items()
            if self._lacks(origin, key) and receivers[key[1]].has_arrived
        ]
        for origin in found:
            self._take(origin, key)
        return bool(found)

    def receive(
        self, step: int, fragment: int, message: selector.Selected
    ) -> list[selector.Selected]:
        """Waits for all messages of a round.

        Args:
          step, fragment: of the round.
          message: this cluster's own payload.

        Returns:
          R payloads, in the order of the clusters.

        Raises:
          session.SessionError: and what else a link raises, if one cannot come.
        """
        key = step, fragment
        while missing := [each for each in self._receivers if self._lacks(each, key)]:
            if self._of_hub is None:
                self._take(missing[0], key)
                continue
            # All come over one line, in any order: what is there is taken, or it would
            # keep the rest from being read.
            if not self._take_all(key):
                what = f"delta {fragment} of step {step} from {', '.join(missing)}"
                if not self._wait_for_any(what) or not self._take_all(key):
                    # None comes any more, or one of another fragment has come: this
                    # raises the reason.
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


def _name(fragment: int, origin: str) -> str:
    return f"delta {fragment} of {origin}"


def _without(clusters: Sequence[str], name: str) -> list[str]:
    return [each for each in clusters if each != name]
