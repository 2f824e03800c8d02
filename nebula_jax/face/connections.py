"""The connections of one cluster of a run, and what all agree on over them."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import nebula_jax
from nebula_jax import errors
from nebula_jax.communication import agreement, bridge
from nebula_jax.communication.wire import frames
from nebula_jax.communication.worker_link import AnyLink
from nebula_jax.face import checks
from nebula_jax.parallel import pace
from nebula_jax.runtime import connect, local_steps
from nebula_jax.runtime import context as context_lib
from nebula_jax.runtime.connect import all_clusters
from nebula_jax.runtime.records import checkpoints


class Connections:
    """The links of a cluster: to those that it dials, that dial it, or to all."""

    rounds: local_steps.Rounds | None = None
    """Of `nebula.local_steps`, as they began."""
    _saved: checkpoints.Checkpoints | None = None
    _peers: all_clusters.Peers | None = None
    _lead: pace.Lead | None = None

    def __init__(
        self,
        context: context_lib.Context,
        clusters: Sequence[str],
        agreed: Mapping[str, Any],
        addresses: Mapping[str, str],
    ) -> None:
        """Begins without any; `addresses` are by name, of one without a name by ""."""
        self.context, self.clusters = context, tuple(clusters)
        self.cluster = context.settings.cluster
        self._agreed, self._addresses = dict(agreed), addresses
        self._dialed: list[Any] = []  # links, or those of a cluster's other processes
        self._listened: list[Any] = []

    def compare(self, **settings: Any) -> None:
        """Lets all clusters compare more settings as they connect.

            run.compare(vocabulary=digest)      # before run.dial, listen or meet

        A checkpoint is checked against them too.

        Args:
          settings: JSON values by name; all clusters have the same.

        Raises:
          Misuse: if it is too late, or a setting of this name is there.
        """
        if self._saved is not None or settings.keys() & self._agreed.keys():
            raise checks.Misuse(
                f"run.compare({', '.join(settings)}) is for settings that are not"
                " compared yet, before run.dial, run.listen, run.meet and run.restore"
            )
        self._agreed |= settings

    @contextlib.contextmanager
    def dial(self, peer: str) -> Iterator[AnyLink]:
        """Connects to a cluster that listens.

        In a chain a middle part listens first, and dials then: what it tells the next
        part about its checkpoints depends on the parts before it.

        Yields:
          The link, for `open` of a half and for channels of your own. Closes with the
          block.
        """
        self._check_names("dial", [peer])
        found = self._addresses.get(peer, self._addresses.get("", ""))
        settings = self._settings(found)
        if not settings.federation and not found:
            raise errors.SettingsError(
                f"cluster={self.cluster} needs peer=HOST:PORT of {peer}"
            )
        connect.check_means(settings, self.cluster, listens=False, dials=True)
        dial = functools.partial(self._connected, settings, [peer, self.cluster])
        question = f"does {peer} call run.listen({self.cluster!r})?"
        with _asking(dial, question) as peers:
            link = peers.links[peer]
            self._dialed.append(link)
            yield link

    @contextlib.contextmanager
    def listen(self, *clusters: str) -> Iterator[Any]:
        """Waits for clusters that dial this one.

        Yields:
          The link, or the links in the order of `clusters`. They close with the block.
        """
        self._check_names("listen", clusters)
        if self._dialed:
            raise checks.Misuse(
                "call run.listen before run.dial: what this cluster tells the next one"
                " depends on those before it"
            )
        settings = self.context.settings.connection
        if not settings.federation:  # there it is the lab that clusters have to be of
            settings = self._settings("")
        connect.check_means(settings, self.cluster, listens=True, dials=False)
        question = f"does {', '.join(clusters)} call run.dial({self.cluster!r})?"
        names = [self.cluster, *clusters]
        wait = functools.partial(self._connected, settings, names)
        with _asking(wait, question) as peers:
            links = list(peers.links.values())
            self._listened += links
            yield links[0] if len(clusters) == 1 else links

    @contextlib.contextmanager
    def meet(
        self, hub: str = "", may_return: bool = False
    ) -> Iterator[all_clusters.Peers]:
        """Connects to all other clusters, which do the same: for local steps.

        Args:
          hub: name of the cluster that all others have their only link to; empty if
            each has one to each.
          may_return: True if clusters may rejoin the hub: for rounds with a quorum.

        Yields:
          The peers, for `nebula.local_steps`.
        """
        dials = all_clusters.dialed(self.cluster, self.clusters, hub)
        named = [self._addresses[each] for each in dials if each in self._addresses]
        settings = self._settings(",".join(named) or self._addresses.get("", ""))
        all_clusters.check_place(settings, self.cluster, self.clusters, hub)
        names = self.clusters
        with self._connected(settings, names, hub=hub, may_return=may_return) as peers:
            self._peers = peers
            yield peers

    def _connected(
        self, settings: connect.Settings, clusters: Sequence[str], **more: Any
    ) -> contextlib.AbstractContextManager[all_clusters.Peers]:
        steps = set(self.saved.steps)
        for link in self._listened:  # the parts before this one of a chain
            steps &= set(link.peer.checkpoints)
        hello = self._hello(steps)
        return self.context.connected(hello, clusters, settings=settings, **more)

    def _settings(self, peer: str) -> connect.Settings:
        return dataclasses.replace(self.context.settings.connection, peer=peer)

    def _check_names(self, method: str, names: Sequence[str]) -> None:
        others = [each for each in self.clusters if each != self.cluster]
        for name in names:
            if name not in others:
                raise checks.Misuse(
                    f"run.{method}({name!r}): the other clusters are"
                    f" {', '.join(others) or 'none'}"
                )

    def _hello(self, steps: Iterable[int]) -> frames.Hello:
        """Returns the Hello of this cluster, which could resume after these steps."""
        # As an error names a script's clusters: --clusters is a flag, their number.
        named = {"clusters": "roles"}
        agreed = {named.get(name, name): each for name, each in self._agreed.items()}
        version = nebula_jax.__version__
        return frames.Hello(self.cluster, version, agreed, tuple(sorted(steps)))

    @property
    def saved(self) -> checkpoints.Checkpoints:
        """The checkpoints of this cluster."""
        if self._saved is None:
            self._saved = self.context.open_checkpoints(self._agreed)
        return self._saved

    @property
    def lines(self) -> list[Any]:
        """The links so far; of local steps also the former ones of who has rejoined."""
        if self._peers is not None:
            return self._peers.lines
        return self._dialed + self._listened

    def _agree_start(self) -> tuple[int, bool]:
        """Returns the newest step that all clusters have, named by the last part.

        And True if the run is at a later one, as of rounds with a quorum.
        """
        if self.rounds is not None:
            return self.rounds.agree_start(self.saved)
        try:
            return self.context.agree_start(self._peers or self._chain()), False
        except agreement.Mismatch as error:
            if self._peers is not None:
                raise
            raise agreement.Mismatch(
                f"{error}; the parts need one h in half.open, and one codec, ahead,"
                " reduce and clip_norm in nebula.cut.front, middle and back"
            ) from None

    def _chain(self) -> all_clusters.Peers:
        """Returns the parts that this one has links to; the hub is the next one."""
        dialed = [link.peer.cluster for link in self._dialed]
        links = {link.peer.cluster: link for link in self.lines}
        hub = (dialed or [self.cluster])[0]
        hello = self._hello(self.saved.steps)
        return all_clusters.Peers(hello, links, dialed, self.clusters, hub)

    def _pace(self) -> Iterator[int]:
        """Returns the steps: of a leader, a follower, one between, or one alone."""
        context = self.context
        if self.rounds is not None:
            return self.rounds.steps()
        if self._dialed:
            return context.follow(self._dialed[0], self._listened)
        if self._listened:
            self._lead = context.lead(self._listened)
            return iter(self._lead)
        return context.alone()


@contextlib.contextmanager
def _asking(connects: Callable[[], Any], question: str) -> Iterator[Any]:
    """Connects; the error of who waits in vain says what the other script has to do."""
    with contextlib.ExitStack() as stack:
        try:
            found = stack.enter_context(connects())
        except bridge.NobodyThere as error:
            raise bridge.NobodyThere(f"{error}; {question}") from None
        yield found


def addresses(peer: str) -> dict[str, str]:
    """Returns the addresses of `back=HOST:PORT,...` by name; one without by ""."""
    found: dict[str, str] = {}
    for each in filter(None, peer.split(",")):
        name, equals, address = each.rpartition("=")
        before = found.get(name)
        found[name] = f"{before},{address}" if before and not equals else address
    return found
