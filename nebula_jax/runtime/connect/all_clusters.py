"""Connections of a run's clusters: all with all, or with a hub.

    with all_clusters.connected(settings, hello, clusters, hub=hub) as peers:
        ...                                  # opens channels on each of peers.links
        start = all_clusters.agree_start(peers, every, window, timeout)
        ...

Of each two clusters the one that is named first listens, and the other one dials; with
a hub all others dial it, and have a link to it alone. There is no deadlock: a cluster
answers while it dials others itself, and links close in one order everywhere.
"""

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence

from nebula_jax import errors
from nebula_jax.communication import bridge, ranks
from nebula_jax.communication import link as link_lib
from nebula_jax.communication import listener as listener_lib
from nebula_jax.communication.link import Link
from nebula_jax.communication.wire import activity, frames
from nebula_jax.communication.worker_link import AnyLink
from nebula_jax.runtime import connect
from nebula_jax.runtime.connect import gathering as gathering_lib
from nebula_jax.runtime.life import process
from nebula_jax.runtime.records import checkpoints
from nebula_jax.security import names as names_lib

PLAIN_RETURN = (
    "tls=off: anybody who reaches this cluster can take the place of one that may"
    " come back"
)


def dialed(cluster: str, clusters: Sequence[str], hub: str = "") -> list[str]:
    """Returns the clusters that one dials, in the order of all, the same everywhere.

    A cluster that is not among them, such as `all`, dials nobody. Raises
    errors.SettingsError if there is no such hub.
    """
    if hub and hub not in clusters:
        raise errors.SettingsError(f"hub={hub}: the clusters are {', '.join(clusters)}")
    if cluster not in clusters or cluster == hub:
        return []
    return [hub] if hub else list(clusters[: clusters.index(cluster)])


def awaited(cluster: str, clusters: Sequence[str], hub: str = "") -> list[str]:
    """Returns the clusters that dial one; for arguments and errors see `dialed`."""
    return [each for each in clusters if cluster in dialed(each, clusters, hub)]


def check_place(
    settings: connect.Settings, cluster: str, clusters: Sequence[str], hub: str = ""
) -> None:
    """Raises errors.NebulaError if a cluster lacks what it needs; see `dialed`."""
    names_lib.check(clusters)
    dials = dialed(cluster, clusters, hub)
    connect.addresses(settings, cluster, dials)
    listens = bool(awaited(cluster, clusters, hub))
    connect.check_means(settings, cluster, listens=listens, dials=bool(dials))


class Peers:
    """The other clusters, as far as this one has links to them."""

    def __init__(
        self,
        hello: frames.Hello,
        links: dict[str, AnyLink],
        dialed: Sequence[str],
        clusters: Sequence[str],
        hub: str = "",
        work: activity.Work | None = None,
        listener: listener_lib.Listener | None = None,
    ) -> None:
        """Takes links whose peers have come; others may rejoin through a listener."""
        self.hello, self.links = hello, links  # links by name, in the order of clusters
        self.lines: list[AnyLink] = list(links.values())  # also former ones
        self.dialed = tuple(dialed)  # it awaits their Welcome; it sends one to the rest
        self.clusters, self.hub = tuple(clusters), hub  # in one order everywhere
        self._listener, self._work = listener, work

    def rejoined(self) -> AnyLink | None:
        """Takes a cluster that has rejoined, without waiting; None if none has, or may.

        Every process of this cluster has to call it at the same place. Whatever waits
        for the cluster on its former link gets session.PeerGone. The new link stands in
        `links`; its channels are still to be opened, and it is to be welcomed.
        """
        link = self._accepted() if self._listener is not None else None
        if not ranks.agree(int(link is not None)):
            return None
        if link is None:
            came: AnyLink = connect.worker_link(self._work)
        else:
            process.message(f"{link.peer.cluster} has rejoined")
            connect.share(link)
            came = link
        self.links[came.peer.cluster] = came
        self.lines.append(came)
        return came

    def _accepted(self) -> Link | None:
        assert self._listener is not None  # else no cluster may
        try:
            return self._listener.accept(0.0)
        except bridge.NobodyThere:
            return None
        except errors.NebulaError as error:  # which it is sent; the others go on
            process.message(f"refused a cluster that rejoined: {error}")
            return None


@contextlib.contextmanager
def connected(
    settings: connect.Settings,
    hello: frames.Hello,
    clusters: Sequence[str],
    *,
    hub: str = "",
    check: bridge.Check = bridge.no_further_check,
    work: activity.Work | None = None,
    may_return: bool = False,
) -> Iterator[Peers]:
    """Waits until this cluster has links to its peers, in whatever order they come.

    `clusters` are names in the same order everywhere; a cluster may leave out those to
    which it is to have no link. A `hub` is the only one that others have links to.
    `check` compares a peer's Hello with what only the caller has. With `may_return`
    clusters may rejoin the hub, or be gone at the end. Links close with the block;
    after an error in it all are aborted.

    Raises bridge.NobodyThere, with names, if some did not come in time;
    bridge.ConnectError if TLS fails; bridge.Mismatch if one runs something else, or is
    another one; session.PeerAborted or session.PeerGone if one gives up, or a dialed
    one is lost.
    """
    dials = dialed(hello.cluster, clusters, hub)
    waits = awaited(hello.cluster, clusters, hub)
    order = [name for name in clusters if name in {*dials, *waits}]
    if may_return and not hub:
        raise errors.SettingsError("clusters can rejoin a hub alone: give a hub")
    if not ranks.is_root() or not order:
        shared: dict[str, AnyLink] = {name: connect.worker_link(work) for name in order}
        yield Peers(hello, shared, dials, clusters, hub, work)
        return
    where = connect.addresses(settings, hello.cluster, dials)
    links: dict[str, AnyLink] = {}
    with contextlib.ExitStack() as stack:
        own = stack.enter_context(connect.Routes(settings, hello, check, work))
        listener = None
        if waits:  # before this cluster dials: none shall find its port closed
            _report_return(settings, may_return)
            listener = stack.enter_context(own.listening(waits, may_return))
        gathering = gathering_lib.Gathering(own, listener)
        try:
            gathering.dial(where)
            gathering.gather(waits)
            for name in order:  # in which the other processes take their part, too
                links[name] = link = gathering.links[name]
                connect.share(link)
            rejoins = listener if may_return else None
            yield Peers(hello, links, dials, clusters, hub, own.work, rejoins)
            _close(links, may_be_gone=may_return and bool(waits))
        except BaseException as error:
            lines = [*gathering.links.values(), *links.values(), *_waiting(listener)]
            gathering_lib.abort(lines, error)
            raise


def _report_return(settings: connect.Settings, may_return: bool) -> None:
    """Prints a line if a cluster that rejoins has nothing to show but a name."""
    is_plain = settings.tls == connect.TLS_OFF and not settings.federation
    if may_return and is_plain and process.LIFELINE_FD not in os.environ:
        process.message(PLAIN_RETURN)


def _close(links: Mapping[str, AnyLink], may_be_gone: bool) -> None:
    """Closes all links, in one order everywhere: no circle of peers waits."""
    for name, link in links.items():
        assert isinstance(link, Link)  # the root's
        try:
            link.close()
        except bridge.ENDED as error:
            if not may_be_gone:
                raise
            process.message(f"{name} is not there at the end: {error}")
            link.abort(str(error))


def _waiting(listener: listener_lib.Listener | None) -> Iterator[Link]:
    """Yields links to those that have come, and that nobody has accepted yet."""
    while listener is not None:
        try:
            yield listener.accept(0.0, with_ended=True)
        except bridge.NobodyThere:
            return
        except errors.NebulaError:  # it has got a reason already
            pass


def agree_start(peers: Peers, every: int, window: int, timeout: float) -> int:
    """Returns the step that all clusters resume after; 0 for the beginning.

    The hub computes it from the steps in all Hellos; without a hub each cluster does,
    and they compare. In a chain the hub of each part is the next one: the last part
    computes it, and the others pass it on. All channels have to be open: this sends
    Welcome, or waits `timeout` seconds for it.

    Checkpoints are `every` so many steps, and a cluster may be `window` ahead of
    another. Raises checkpoint.CheckpointError as `checkpoints.newest_of_all`;
    bridge.Mismatch if another cluster goes on after another step, or has other
    channels; link.Timeout if one that was dialed does not welcome this cluster in time.
    """
    if not ranks.is_root():
        return ranks.agree(0)
    own, deadline = peers.hello.cluster, time.monotonic() + timeout
    if peers.hub in ("", own):
        steps = {name: link.peer.checkpoints for name, link in peers.links.items()}
        steps[own] = peers.hello.checkpoints
        start = checkpoints.newest_of_all(steps, every, window)
    else:
        start = peers.links[peers.hub].wait_for_welcome(timeout)
    for name, link in peers.links.items():
        if name not in peers.dialed:
            link.welcome(start)
    for name in (each for each in peers.dialed if each != peers.hub):
        there = _welcomed(peers, name, deadline, timeout)
        if there != start:
            raise bridge.Mismatch(
                f"{name} goes on after step {there}, {own} after step {start}"
            )
    return ranks.agree(start)


def _welcomed(peers: Peers, name: str, deadline: float, timeout: float) -> int:
    """Waits for a cluster's Welcome, unless one that it may wait for ends."""
    while True:
        left = deadline - time.monotonic()
        try:
            seconds = max(0.0, min(left, gathering_lib.POLL_SECONDS))
            return peers.links[name].wait_for_welcome(seconds)
        except link_lib.Timeout:
            if left <= 0:
                text = f"waited {timeout:g} s for its Welcome (connect_timeout)"
                raise link_lib.Timeout(f"{name}: {text}") from None
        for link in peers.links.values():
            if isinstance(link, Link) and link.is_over:
                link.close()  # raises what has ended it
