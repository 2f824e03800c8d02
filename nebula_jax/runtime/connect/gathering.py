"""The rendezvous of a cluster with others: from no links to one to each.

Some are dialed, and some come; those that are missing at the end are named.
"""

import contextlib
import functools
import re
import threading
import time
from collections.abc import Iterable, Mapping, Sequence

from nebula_jax import errors
from nebula_jax.communication import bridge, endpoints
from nebula_jax.communication import listener as listener_lib
from nebula_jax.communication.link import Link
from nebula_jax.communication.wire import frames, session
from nebula_jax.communication.worker_link import AnyLink
from nebula_jax.runtime import connect

POLL_SECONDS = 0.1  # between looks at the links, while others are waited for
_AFTER = re.compile(r" after [0-9.]+ s \(-*connect_timeout\)")  # seconds for one dial


class Gathering:
    """The links of a cluster until all are there."""

    def __init__(
        self, own: connect.Routes, listener: listener_lib.Listener | None
    ) -> None:
        """Starts without links; `listener` is None if no cluster is waited for."""
        self._listener = listener
        self.links: dict[str, Link] = {}  # all so far, those that ended included
        self._routes, self._timeout = own, own.settings.connect_timeout
        self._deadline = time.monotonic() + self._timeout
        self._dialed: list[Link] = []
        self._absent: dict[str, str] = {}  # name -> why, as far as there is a reason
        self._is_done = False

    def dial(self, where: Mapping[str, tuple[str, int] | None]) -> None:
        """Connects to those that listen; one that does not answer is absent."""
        for name, address in where.items():
            left = max(0.0, round(self._deadline - time.monotonic(), 1))
            try:
                link = self._routes.dial(
                    name,
                    address,
                    check=functools.partial(self._check_dialed, name, address),
                    seconds=left,
                    gate=functools.partial(self._check_others, name),
                )
            except bridge.NobodyThere as error:
                self._absent[name] = _AFTER.sub("", str(error))
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
            raise bridge.Mismatch(f"{peer.cluster} answers {at} {name} should (peer)")
        self._routes.check(peer)

    def _check_others(self, name: str) -> None:
        """Raises bridge.ConnectError if dialing is of no use: another one has ended.

        That may be one that has come while this cluster dials: then the one that is
        dialed has ended as well, and would be dialed until the deadline.
        """
        if self._is_done:
            return
        if name not in self.links:  # else it is a lost link that comes back
            with contextlib.suppress(bridge.NobodyThere):
                self._take_one(0.0)
        if any(link.is_over for link in self._dialed) or self._end() is not None:
            raise bridge.ConnectError("another cluster has ended")

    def _take_one(self, seconds: float) -> None:
        """Waits for one that comes. Raises bridge.NobodyThere if none does."""
        if self._listener is None:
            raise bridge.NobodyThere("nobody is waited for")
        link = self._listener.accept(seconds, with_ended=True)
        self.links[link.peer.cluster] = link

    def _raise_ended(self) -> None:
        """Raises what has ended a link, if that is the end of all."""
        if (error := self._end()) is not None:
            raise error

    def _end(self) -> errors.NebulaError | None:
        """Returns what has ended a link, if that is the end of all.

        A cluster that gave up had a reason. A lost one may rejoin, unless this cluster
        is the one that dials.
        """
        for link in list(self.links.values()):
            if link.is_over:
                try:
                    link.close()
                except session.PeerAborted as error:
                    return error
                except errors.NebulaError as error:
                    if link in self._dialed:
                        return error
        return None

    def gather(self, waits: Sequence[str]) -> None:
        """Waits for those that dial, unless another one ends."""
        while missing := [
            name
            for name in waits  # one that is away may rejoin
            if name not in self.links or self.links[name].is_away
        ]:
            self._raise_ended()
            left = self._deadline - time.monotonic()
            try:
                self._take_one(max(0.0, min(left, POLL_SECONDS)))
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
                f" {self._timeout:g} s (connect_timeout)"
            )
        self._is_done = True


def _reason(link: Link | None) -> str:
    """Returns why there is none to use; empty if there was none at all."""
    if link is None or not link.is_over:
        return "" if link is None else "its connection is lost"
    try:
        link.close()
    except errors.NebulaError as error:
        return str(error)
    return ""


def abort(links: Iterable[AnyLink], error: BaseException) -> None:
    """Aborts all links at once: one that takes long keeps no other cluster waiting."""
    reason = errors.reason(error)
    threads = [
        threading.Thread(target=link.abort, args=(reason,), daemon=True)
        for link in links
        if isinstance(link, Link)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
