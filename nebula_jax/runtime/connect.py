"""The meeting of a run's clusters: one listens, the others dial.

with connect.dial(settings, hello, peer="discriminator") as link: ...
with connect.listen(settings, hello, ["generator:0", "generator:1"]) as links: ...
"""

import contextlib
import dataclasses
import functools
import os
import pathlib
import socket
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from nebula_jax import errors, trace
from nebula_jax.communication import bridge, ranks, wan
from nebula_jax.communication import listener as listener_lib
from nebula_jax.communication.link import Link
from nebula_jax.communication.wire import activity, frames, states
from nebula_jax.communication.wire import spool as spool_lib
from nebula_jax.communication.worker_link import WorkerLink, share_peer
from nebula_jax.runtime import addresses, cluster, own_switch, process
from nebula_jax.security import federation, member, tls
from nebula_jax.security.switch import inner, requests

LISTEN_FD = "NEBULA_LISTEN_FD"  # set by the launcher: an inherited listening socket
TLS_OFF, TLS_AUTO = "off", "auto"
PLAIN = (
    "--tls=off: anybody on the way can read and change what crosses; accidental damage"
    " alone is noticed"
)

Check = Callable[[frames.Hello], None]


@dataclasses.dataclass(frozen=True)
class Settings:
    """The addresses, TLS, line and timeouts of a cluster, named like their flags."""

    listen: str = "127.0.0.1:0"
    """HOST:PORT where the listener waits."""
    peer: str = ""
    """HOST:PORT of the listener, for those who dial; in a federation the lab that all
    peers have to be of, or empty."""
    tls: str = TLS_OFF
    """Credentials (see `security.credentials.files`), or `off` for plain TCP."""
    federation: str = ""
    """Folder of this lab in a federation, whose switches carry what crosses; empty for
    connections of the clusters' own."""
    account: str = ""
    """Account that has logged in, in a federation; empty for the folder's owner."""
    job: str = ""
    """Name by which a federation's clusters find each other."""
    wan: str = ""
    """Emulated line, such as 60mbit,15ms; empty for none."""
    connect_timeout: float = 60.0
    """Seconds to wait for the other clusters."""
    peer_timeout: float = 30.0
    """Seconds of silence after which a connection counts as lost."""
    reconnect_timeout: float = 60.0
    """Seconds that a lost connection may take to come back."""
    stuck_timeout: float = 0.0
    """Seconds that a peer may get nothing done; 0 to derive them from the steps."""

    def __post_init__(self) -> None:
        """Raises errors.NebulaError at what cannot work."""
        for name in ("connect_timeout", "peer_timeout"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise errors.SettingsError(
                    f"--{name}={value:g}: must be above 0 seconds"
                )
        for name in ("reconnect_timeout", "stuck_timeout"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise errors.SettingsError(f"--{name}={value:g}: must not be negative")
        wan.from_string(self.wan)
        addresses.host_and_port("listen", self.listen)
        if self.federation:
            if self.peer and not federation.is_lab(self.peer):
                raise errors.SettingsError(
                    f"--peer={self.peer}: with --federation it is the name of a lab"
                )
            if not requests.is_job(self.job):
                raise errors.SettingsError(
                    f"--job={self.job}: expected up to 64 letters, digits, ., _ and -"
                )
        elif self.peer:
            addresses.host_and_port("peer", self.peer)


def check_role(settings: Settings, cluster: str, listener: str, connector: str) -> None:
    """Checks that a cluster has what it needs to meet the others.

    Args:
      settings: of this process.
      cluster: what it is: `all`, `whole`, or a cluster's name.
      listener: name of the cluster that listens.
      connector: name of those that dial, as in `generator` of `generator:0`.

    Raises:
      errors.NebulaError: before anything has started.
    """
    listens = cluster == listener
    dials = cluster.partition(":")[0] == connector
    if settings.federation:
        if listens or dials:
            _check_federation(settings)
        return
    if dials and not settings.peer:
        raise errors.SettingsError(
            f"--cluster={cluster} needs --peer=HOST:PORT of the {listener}"
        )
    if settings.peer and not dials:
        raise errors.SettingsError(
            f"--peer is for a {connector}, not for --cluster={cluster}"
        )
    port = addresses.host_and_port("listen", settings.listen)[1]
    if listens and not port and LISTEN_FD not in os.environ:
        raise errors.SettingsError(f"--cluster={listener} needs --listen=HOST:PORT")
    if listens and LISTEN_FD in os.environ:
        process.handed_down(LISTEN_FD, stat.S_ISSOCK)
    if not listens and not dials:
        return
    if settings.tls == TLS_AUTO:
        raise errors.SettingsError(
            f"--cluster={cluster} needs --tls=FOLDER with its certificate"
            " (python -m scripts.issue_certificates makes them), or --tls=off for"
            " plain TCP, which anybody on the way can read and change"
        )
    if settings.tls != TLS_OFF:
        contexts = tls.server_contexts if listens else tls.client_contexts
        contexts(pathlib.Path(settings.tls), cluster)


def _check_federation(settings: Settings) -> None:
    """Raises errors.NebulaError unless this process can be a trainer of its lab."""
    folder = federation.Folder(pathlib.Path(settings.federation))
    member.load(folder, "trainer")
    inner.read(folder)
    own_switch.token_of(folder, settings.account)


def _trainer(settings: Settings, cluster: str) -> own_switch.Trainer:
    return own_switch.Trainer(
        federation.Folder(pathlib.Path(settings.federation)),
        *(settings.account, settings.job, cluster, settings.peer),
    )


@functools.cache
def recorder(settings: Settings, cluster: str) -> own_switch.Recorder:
    """Returns this process's way into the audit log of its lab.

    Args:
      settings: of this cluster; without a federation nothing is recorded.
      cluster: its name.
    """
    folder = federation.Folder(pathlib.Path(settings.federation))
    if not settings.federation:
        return own_switch.Recorder(None, "", "", "")
    return own_switch.Recorder(folder, settings.account, settings.job, cluster)


def report_plain(settings: Settings) -> None:
    """Prints a line if nothing protects what crosses; a launcher has printed it."""
    if settings.federation:
        return
    if settings.tls == TLS_OFF and process.LIFELINE_FD not in os.environ:
        process.message(PLAIN)


def dial(
    settings: Settings,
    hello: frames.Hello,
    *,
    peer: str,
    check: Check = bridge.no_further_check,
    work: activity.Work | None = None,
    spool: spool_lib.Spool | None = None,
) -> Link | WorkerLink:
    """Connects to the listener; in a cluster of many processes its root does.

    Args:
      settings: of this cluster.
      hello: of this cluster.
      peer: the listener's name, which its certificate must carry.
      check: compares the peer's Hello with what only the caller has; raises
        bridge.Mismatch.
      work: what this process does; a new one if not given.
      spool: for what is sent while the line is down; none if not given.

    Returns:
      A link whose peer sent a Hello that agrees with this one.

    Raises:
      bridge.ConnectError: if nobody answers, or TLS fails.
      bridge.Mismatch: if the peer runs something else.
    """
    if not ranks.is_root():
        return WorkerLink(share_peer(None), _trace(work))
    report_plain(settings)
    more: dict[str, Any] = {}
    trainer = None
    if settings.federation:
        trainer = _trainer(settings, hello.cluster)
        address = inner.read(trainer.folder)[:2]
        more = {
            "reach": trainer.reach(peer),
            "finish": trainer.finish(states.Role.CONNECTOR),
            "tls": trainer.client_context,
        }
    else:
        address = addresses.host_and_port("peer", settings.peer)
        if settings.tls != TLS_OFF:
            folder = pathlib.Path(settings.tls)
            more = {"tls": tls.client_contexts(folder, hello.cluster)}
    link = bridge.connect(
        address,
        hello,
        connect_timeout=settings.connect_timeout,
        peer_timeout=settings.peer_timeout,
        reconnect_timeout=settings.reconnect_timeout,
        peer=peer,
        line=wan.from_string(settings.wan).up,
        log=process.message,
        check=check,
        work=work or activity.Work(settings.stuck_timeout),
        spool=spool,
        **more,
    )
    if trainer is not None:
        link.release = trainer.close
    _share(link)
    return link


def _trace(work: activity.Work | None) -> trace.Trace:
    return work.trace if work else trace.OFF


def _share(link: Link) -> None:
    """Lets the other processes of this cluster have part in a link of the root's."""
    if ranks.count() > 1:
        cluster.on_end(link.abort)
        share_peer(link.peer)


@contextlib.contextmanager
def listen(
    settings: Settings,
    hello: frames.Hello,
    clusters: Sequence[str],
    *,
    check: Check = bridge.no_further_check,
    work: activity.Work | None = None,
) -> Iterator[list[Link] | list[WorkerLink]]:
    """Waits for all `clusters`, in whatever order they connect; the root does.

    Args:
      settings: of this cluster.
      hello: of this cluster.
      clusters: names of those that dial.
      check, work: as in `dial`.

    Yields:
      A link to each, in the order of `clusters`. They close with the block.

    Raises:
      bridge.NobodyThere: if one did not connect in time.
      bridge.Mismatch: if one of them runs something else. Others are refused.
    """
    if not ranks.is_root():
        yield [WorkerLink(share_peer(None), _trace(work)) for _ in clusters]
        return
    report_plain(settings)
    deadline = time.monotonic() + settings.connect_timeout
    with contextlib.ExitStack() as stack:
        more: dict[str, Any] = {}
        if settings.federation:
            trainer = _trainer(settings, hello.cluster)
            stack.callback(trainer.close)
            finish = trainer.finish(states.Role.LISTENER)
            more = {"tls": trainer.server_context, "finish": finish}
        elif settings.tls != TLS_OFF:
            folder = pathlib.Path(settings.tls)
            more = {"tls": tls.server_contexts(folder, hello.cluster)}
        listener = stack.enter_context(
            listener_lib.Listener(
                listening_socket(settings),
                hello,
                peer_timeout=settings.peer_timeout,
                reconnect_timeout=settings.reconnect_timeout,
                clusters=clusters,
                line=wan.from_string(settings.wan).down,
                log=process.message,
                check=check,
                work=work or activity.Work(settings.stuck_timeout),
                **more,
            )
        )
        if settings.federation:
            trainer.serve(listener.address[1])
        links = _gather(listener, clusters, deadline, settings.connect_timeout)
        for link in links:
            stack.enter_context(link)
            _share(link)
        yield links


def _gather(
    listener: listener_lib.Listener,
    clusters: Sequence[str],
    deadline: float,
    timeout: float,
) -> list[Link]:
    """Returns a link to each cluster, or ends those that have come with the error."""
    links: dict[str, Link] = {}

    def missing() -> list[str]:
        """Returns who has not come, or has gone for good: it may come anew."""
        return [name for name in clusters if name not in links or links[name].is_over]

    try:
        while missing():
            link = listener.accept(deadline - time.monotonic())
            links[link.peer.cluster] = link
    except BaseException as error:
        if isinstance(error, bridge.NobodyThere):
            error = bridge.NobodyThere(
                f"{', '.join(missing())} did not come within {timeout:g} s"
                " (--connect_timeout)"
            )
        for link in links.values():
            link.abort(str(error) or type(error).__name__)
        raise error from None
    return [links[name] for name in clusters]


def listening_socket(settings: Settings) -> socket.socket:
    """Returns the listener's socket: the launcher's, or one bound to `listen`."""
    if LISTEN_FD in os.environ:
        found = process.handed_down(LISTEN_FD, stat.S_ISSOCK)
        return socket.socket(fileno=found)
    return listener_lib.listen(addresses.host_and_port("listen", settings.listen))
