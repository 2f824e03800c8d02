"""Admission to a listener: which clusters may come, and come as what.

A certificate names its cluster. Without TLS, a name is all that a peer has to show.
"""

import dataclasses
from collections.abc import Collection, Iterable

from nebula_jax import errors, printable
from nebula_jax.communication import bridge
from nebula_jax.communication import link as link_lib
from nebula_jax.communication.wire import frames, greeting, session
from nebula_jax.security import names as names_lib


class Refused(errors.NebulaError):
    """A peer that is not let in; it is sent the reason."""


@dataclasses.dataclass(frozen=True)
class Rules:
    """The rules of one listener, which has the fields as arguments."""

    hello: frames.Hello
    clusters: Collection[str] | None
    may_return: bool

    def check_certificate(self, connected: greeting.Connected) -> None:
        """Raises Refused unless a cluster that may come can have this certificate."""
        if connected.clusters is None or self.clusters is None:
            return
        expected = {names_lib.label(cluster) for cluster in self.clusters}
        if not connected.clusters & expected:
            owner = printable.line(connected.owner) or "nobody's DNS name"
            raise Refused(f"a certificate for {owner} was not expected")

    def check_peer(
        self,
        peer: frames.Hello,
        connected: greeting.Connected,
        links: Iterable[link_lib.Link],
    ) -> None:
        """Admits a new peer, for whom a link of the same name ends if it has to.

        Raises:
          Refused: if it may not have this name, or not now.
        """
        cluster = peer.cluster
        try:
            bridge.check_certificate(cluster, connected)
        except bridge.Mismatch as error:
            raise Refused(str(error)) from None
        if self.clusters is not None and cluster not in self.clusters:
            raise Refused(f"{cluster} was not expected")
        for link in links:
            if link.peer.cluster == cluster and not link.is_over:
                self._make_room(link, peer, connected)

    def _make_room(
        self, link: link_lib.Link, peer: frames.Hello, connected: greeting.Connected
    ) -> None:
        cluster = peer.cluster
        anew = f"{cluster} was started anew"
        newest = max(peer.checkpoints, default=0)
        has = f"step {newest}" if newest else "none"
        again = f"{session.START_AGAIN} ({cluster} has saved {has})"
        if self.may_return:
            try:  # before who is there loses its place to one that cannot take part
                bridge.check_agreement(self.hello, peer)
            except bridge.Mismatch as error:
                raise Refused(str(error)) from None
            link.give_up(f"{anew}, without its session")
        elif not link.is_away:
            raise Refused(f"{cluster} is here already")
        elif not link.has_begun:
            link.abort(anew)
        elif not connected.owner:  # anybody could end a run whose line breaks
            raise Refused(
                f"{cluster} is expected back, not anew; if its process has ended, end"
                f" the others too and {again}"
            )
        else:  # both start again, and go on from what is saved
            link.give_up(f"{anew}, so its session cannot go on: {again}")
            raise Refused(f"the session that {cluster} had is over now: {again}")
