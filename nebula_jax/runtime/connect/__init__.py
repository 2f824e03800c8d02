"""Connections of a run's clusters: one listens, the others dial.

with connect.dial(settings, hello, peer="discriminator") as link: ...
with connect.listen(settings, hello, ["generator:0", "generator:1"]) as links: ...

In `all_clusters` a cluster may do both. `routes` has the connections themselves.
"""

import contextlib
import functools
import os
import pathlib
import stat
from collections.abc import Iterator, Sequence

from nebula_jax import errors, installed
from nebula_jax.communication import bridge, endpoints, ranks
from nebula_jax.communication.link import Link
from nebula_jax.communication.wire import activity, frames
from nebula_jax.communication.worker_link import WorkerLink
from nebula_jax.federation import inner, switch_client, trainer_keys
from nebula_jax.runtime.connect import gathering as gathering_lib
from nebula_jax.runtime.connect import routes
from nebula_jax.runtime.life import process
from nebula_jax.security import tls
from nebula_jax.security.membership import site_folder

Settings = routes.Settings


def check_role(settings: Settings, cluster: str, listener: str, connector: str) -> None:
    """Checks that a cluster has what it needs to meet the others.

    Args:
      cluster: what it is: `all`, `whole`, or a cluster's name.
      listener: name of the cluster that listens.
      connector: name of those that dial, as in `generator` of `generator:0`.

    Raises:
      errors.NebulaError: before anything has started.
    """
    dials = [listener] if cluster.partition(":")[0] == connector else []
    addresses(settings, cluster, dials)
    listens = cluster == listener
    check_means(settings, cluster, listens=listens, dials=bool(dials))


def addresses(
    settings: Settings, cluster: str, dials: Sequence[str]
) -> list[tuple[str, int] | None]:
    """Returns the address of each cluster that one dials; None in a federation.

    Raises:
      errors.SettingsError: if `peer` has more or fewer.
    """
    if settings.federation:
        return [None for _ in dials]
    found = endpoints.hosts_and_ports("peer", settings.peer)
    if len(found) == len(dials):
        return list(found)
    if not dials:
        raise errors.SettingsError(
            f"peer={settings.peer}: cluster={cluster} dials no other one"
        )
    form = "HOST:PORT,..." if len(dials) > 1 else "HOST:PORT"
    count = f"{len(dials)} address{'es' * (len(dials) > 1)}"
    raise errors.SettingsError(
        f"cluster={cluster} needs peer={form} with {count}, of {', '.join(dials)}"
        f" in this order; it has {len(found)}"
    )


def check_means(
    settings: Settings, cluster: str, *, listens: bool, dials: bool
) -> None:
    """Checks a cluster's port and credentials, or its place in a federation.

    Raises:
      errors.NebulaError: before anything has started.
    """
    if settings.federation:
        if listens or dials:
            _check_federation(settings)
        return
    port = endpoints.host_and_port("listen", settings.listen)[1]
    if listens and not port and routes.LISTEN_FD not in os.environ:
        raise errors.SettingsError(f"cluster={cluster} needs listen=HOST:PORT")
    if listens and routes.LISTEN_FD in os.environ:
        process.handed_down(routes.LISTEN_FD, stat.S_ISSOCK)
    if not listens and not dials:
        return
    if settings.tls == routes.TLS_AUTO:
        raise errors.SettingsError(
            f"cluster={cluster} needs tls=FOLDER with its certificate"
            f" ({installed.COMMAND} scripts.issue_certificates makes them), or tls=off"
            " for plain TCP, which anybody on the way can read and change"
        )
    if settings.tls != routes.TLS_OFF:
        contexts = tls.server_contexts if listens else tls.client_contexts
        contexts(pathlib.Path(settings.tls), cluster)


def _check_federation(settings: Settings) -> None:
    """Raises errors.NebulaError unless this process can be a trainer of its lab."""
    folder = site_folder.Folder(pathlib.Path(settings.federation))
    inner.read(folder)
    trainer_keys.prepare(folder)


@functools.cache
def recorder(settings: Settings, cluster: str) -> switch_client.Recorder:
    """Returns this process's way into the audit log of its lab, if there is one."""
    folder = site_folder.Folder(pathlib.Path(settings.federation))
    if not settings.federation:
        return switch_client.Recorder(None, "", "")
    return switch_client.Recorder(folder, settings.job, cluster, process.message)


def dial(
    settings: Settings,
    hello: frames.Hello,
    *,
    peer: str,
    check: bridge.Check = bridge.no_further_check,
    work: activity.Work | None = None,
) -> Link | WorkerLink:
    """Connects to the listener; in a cluster of many processes its root does.

    Args:
      peer: the listener's name, which its certificate must carry.
      check: compares the peer's Hello with what only the caller has; raises
        bridge.Mismatch.
      work: what this process does; a new one if not given.

    Raises:
      bridge.ConnectError: if nobody answers, or TLS fails.
      bridge.Mismatch: if the peer runs something else.
    """
    if not ranks.is_root():
        return routes.worker_link(work)
    own = routes.Routes(settings, hello, check, work)
    try:
        (address,) = addresses(settings, hello.cluster, [peer])
        link = own.dial(peer, address)
    except BaseException:
        own.close()
        raise
    link.release = own.close
    routes.share(link)
    return link


@contextlib.contextmanager
def listen(
    settings: Settings,
    hello: frames.Hello,
    clusters: Sequence[str],
    *,
    check: bridge.Check = bridge.no_further_check,
    work: activity.Work | None = None,
) -> Iterator[list[Link] | list[WorkerLink]]:
    """Waits for all `clusters`, in whatever order they connect; the root does.

    Args:
      clusters: names of those that dial.
      check, work: as in `dial`.

    Yields:
      A link to each, in the order of `clusters`. They close with the block.

    Raises:
      bridge.NobodyThere: if one did not connect in time.
      bridge.Mismatch: if one of them runs something else. Others are refused.
      session.PeerAborted: if one of them gives up before all are there.
    """
    if not ranks.is_root():
        yield [routes.worker_link(work) for _ in clusters]
        return
    with contextlib.ExitStack() as stack:
        own = stack.enter_context(routes.Routes(settings, hello, check, work))
        gathering = gathering_lib.Gathering(own)
        listener = stack.enter_context(own.listening(clusters))
        try:
            gathering.gather(clusters, listener)
        except BaseException as error:
            gathering_lib.abort(gathering.links.values(), error)
            raise
        links = [gathering.links[name] for name in clusters]
        for link in links:
            stack.enter_context(link)
            routes.share(link)
        yield links
