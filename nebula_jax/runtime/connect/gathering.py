"""The way from no links to one to each of the other clusters.

Some are dialed, and some come; who is missing at the end is named.
"""

import functools
import time
from collections.abc import Mapping, Sequence

from nebula_jax import errors
from nebula_jax.communication import bridge, endpoints
from nebula_jax.communication import listener as listener_lib
from nebula_jax.communication.link import Link
from nebula_jax.communication.wire import activity, frames, session
from nebula_jax.federation import switch_client
from nebula_jax.runtime.connect import routes

POLL_SECONDS = 0.1  # between looks at those who are there, while others are waited for


class Gathering:
    """The links of a cluster until all are there."""

    def __init__(
        self,
        settings: routes.Settings,
        hello: frames.Hello,
        check: routes.Check,
        work: activity.Work,
    ) -> None:
        """Starts without links; for the arguments see `all_clusters.meet`."""
        self.links: dict[str, Link] = {}
        """All so far, those that ended included."""
        self._settings, self._hello = settings, hello
        self._check, self._work = check, work
        self._deadline = time.monotonic() + settings.connect_timeout
        self._dialed: list[Link] = []
        self._absent: dict[str, str] = {}  # name -> why, as far as there is a reason
        self._is_done = False

    def dial(
        self,
        where: Mapping[str, tuple[str, int] | None],
        trainer: switch_client.Trainer | None,
    ) -> None:
        """Connects to those that listen; who does not answer is absent."""
        for name, address in where.items():
            left = max(0.0, round(self._deadline - time.monotonic(), 1))
            try:
                link = routes.reached(
                    *(self._settings, self._hello, name, address, trainer),
                    check=functools.partial(self._check_dialed, name, address),
                    work=self._work,
                    seconds=left,
                    gate=self._check_others,
                )
            except bridge.NobodyThere as error:
                self._absent[name] = str(error).replace(_after(left), "")
            except bridge.ConnectError:
                self._raise_ended()
                raise
            else:
                self.links[name] = link
                self._dialed.append(link)

    def _check_dialed(
        self, name: str, address: tuple[str, int] | None, peer: frames.Hello
    ) -> None:
        """Raises bridge.Mismatch unless the one that was dialed has answered."""
        if peer.cluster != name:
            at = f"at {endpoints.written(address)}, where" if address else "where"
            raise bridge.Mismatch(f"{peer.cluster} answers {at} {name} should (--peer)")
        self._check(peer)

    def _check_others(self) -> None:
        """Raises bridge.ConnectError if dialing is of no use: another one has ended."""
        if not self._is_done and any(link.is_over for link in self._dialed):
            raise bridge.ConnectError("another cluster has ended")

    def _raise_ended(self) -> None:
        """Raises what has ended a link, if that is the end of all.

        Who gave up had a reason. Who was lost may come anew, unless it is to be dialed.
        """
        for link in self.links.values():
            if link.is_over:
                try:
                    link.close()
                except session.PeerAborted:
                    raise
                except errors.NebulaError:
                    if link in self._dialed:
                        raise

    def gather(
        self, waits: Sequence[str], listener: listener_lib.Listener | None
    ) -> None:
        """Waits for those that dial, unless another one ends."""
        while missing := [name for name in waits if self._is_missing(name)]:
            assert listener is not None  # for whoever is waited for
            self._raise_ended()
            left = self._deadline - time.monotonic()
            try:
                seconds = max(0.0, min(left, POLL_SECONDS))
                link = listener.accept(seconds, with_ended=True)
                self.links[link.peer.cluster] = link
            except bridge.NobodyThere:
                if left <= 0:
                    break
        for name in missing:
            self._absent[name] = _reason(self.links.get(name))
        self._raise_ended()
        if self._absent:
            names = [
                f"{name} ({why})" if why else name for name, why in self._absent.items()
            ]
            raise bridge.NobodyThere(
                f"{', '.join(names)} did not come within"
                f" {self._settings.connect_timeout:g} s (--connect_timeout)"
            )
        self._is_done = True

    def _is_missing(self, name: str) -> bool:
        """Returns True for one who has not come, or is away: it may come anew."""
        return name not in self.links or self.links[name].is_away


def _after(seconds: float) -> str:
    """Returns the words of a bridge.NobodyThere for the seconds that were left."""
    return f" after {seconds:g} s (--connect_timeout)"


def _reason(link: Link | None) -> str:
    """Returns why there is none to use; empty if there was none at all."""
    if link is None or not link.is_over:
        return "" if link is None else "its connection is lost"
    try:
        link.close()
    except errors.NebulaError as error:
        return str(error)
    return ""
