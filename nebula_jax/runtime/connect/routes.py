"""The ways of a cluster to others: with the settings, connections and listeners.

Either its own, with TLS or plain, or those of the switches of a federation. `connect`
and `all_clusters` have what clusters do with them.
"""

import contextlib
import dataclasses
import os
import pathlib
import socket
import stat
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from nebula_jax import errors, trace
from nebula_jax.communication import bridge, endpoints, ranks, wan
from nebula_jax.communication import listener as listener_lib
from nebula_jax.communication.link import Link
from nebula_jax.communication.wire import activity, frames, states
from nebula_jax.communication.worker_link import WorkerLink, share_peer
from nebula_jax.federation import inner, requests, switch_client
from nebula_jax.runtime.connect import addresses
from nebula_jax.runtime.life import process
from nebula_jax.runtime.ranks import cluster
from nebula_jax.security import tls
from nebula_jax.security.audit import entries
from nebula_jax.security.membership import site_folder

LISTEN_FD = "NEBULA_LISTEN_FD"  # set by the launcher: an inherited listening socket
TLS_OFF, TLS_AUTO = "off", "auto"

Check = Callable[[frames.Hello], None]
"""Given a peer's Hello, raises bridge.Mismatch unless it fits."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """The addresses, TLS, line and timeouts of a cluster, named like their flags."""

    listen: str = "127.0.0.1:0"
    """HOST:PORT where the listener waits."""
    peer: str = ""
    """HOST:PORT of the listener, for those who dial; of several with commas between
    them. In a federation the lab that all peers have to be of, or empty."""
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
            if self.peer and not site_folder.is_lab(self.peer):
                raise errors.SettingsError(
                    f"--peer={self.peer}: with --federation it is the name of a lab"
                )
            if entries.may_be_secret(self.job):  # which is not shown again
                raise errors.SettingsError(
                    "--job: the name reads like an invitation, which the audit log"
                    " refuses: choose another"
                )
            if not requests.is_job(self.job):
                raise errors.SettingsError(
                    f"--job={self.job}: expected up to 64 letters, digits, ., _ and -"
                )
        else:
            addresses.hosts_and_ports("peer", self.peer)


def trainer_of(settings: Settings, cluster: str) -> switch_client.Trainer | None:
    """Returns this process's part in a federation, to be closed; None without one.

    Args:
      settings: of this cluster.
      cluster: its name.
    """
    if not settings.federation:
        return None
    return switch_client.Trainer(
        site_folder.Folder(pathlib.Path(settings.federation)),
        *(settings.account, settings.job, cluster, settings.peer),
    )


def reached(
    settings: Settings,
    hello: frames.Hello,
    peer: str,
    address: tuple[str, int] | None,
    trainer: switch_client.Trainer | None,
    *,
    check: Check,
    work: activity.Work,
    seconds: float | None = None,
    gate: Callable[[], None] | None = None,
) -> Link:
    """Connects this process to a listening cluster.

    Args:
      settings, hello, peer, check, work: as in `connect.dial`.
      address: host and port of the listener; None in a federation.
      trainer: this process's part in a federation.
      seconds: to keep trying for, if not as long as the settings have it.
      gate: called before each attempt, also when a lost connection is to come back;
        raises bridge.ConnectError to prevent it.

    Raises:
      bridge.ConnectError, bridge.Mismatch: as in `connect.dial`.
    """
    more: dict[str, Any] = {}
    if trainer is not None:
        address = inner.read(trainer.folder)[:2]
        way = trainer.reach(peer)
        more = {
            "finish": trainer.finish(states.Role.CONNECTOR),
            "tls": trainer.client_context,
        }
    else:
        assert address is not None  # it is not a federation
        way = bridge.directly(address, peer)
        if settings.tls != TLS_OFF:
            folder = pathlib.Path(settings.tls)
            more = {"tls": tls.client_contexts(folder, hello.cluster)}

    def reach(patience: float) -> tuple[socket.socket, str]:
        if gate is not None:
            gate()
        return way(patience)

    return bridge.connect(
        address,
        hello,
        connect_timeout=settings.connect_timeout if seconds is None else seconds,
        peer_timeout=settings.peer_timeout,
        reconnect_timeout=settings.reconnect_timeout,
        peer=peer,
        line=wan.from_string(settings.wan).up,
        log=process.message,
        check=check,
        work=work,
        reach=reach,
        **more,
    )


@contextlib.contextmanager
def listening(
    settings: Settings,
    hello: frames.Hello,
    clusters: Sequence[str],
    trainer: switch_client.Trainer | None,
    *,
    check: Check,
    work: activity.Work,
    may_return: bool = False,
) -> Iterator[listener_lib.Listener]:
    """Opens the listener of this process; links need it for as long as they live.

    Args:
      settings, hello, clusters, check, work: as in `connect.listen`.
      trainer: this process's part in a federation.
      may_return: see `listener.Listener`.
    """
    more: dict[str, Any] = {}
    if trainer is not None:
        finish = trainer.finish(states.Role.LISTENER)
        more = {"tls": trainer.server_context, "finish": finish}
    elif settings.tls != TLS_OFF:
        folder = pathlib.Path(settings.tls)
        more = {"tls": tls.server_contexts(folder, hello.cluster)}
    with listener_lib.Listener(
        listening_socket(settings),
        hello,
        peer_timeout=settings.peer_timeout,
        reconnect_timeout=settings.reconnect_timeout,
        clusters=clusters,
        may_return=may_return,
        line=wan.from_string(settings.wan).down,
        log=process.message,
        check=check,
        work=work,
        **more,
    ) as found:
        if trainer is not None:
            trainer.serve(found.address[1])
        yield found


def listening_socket(settings: Settings) -> socket.socket:
    """Returns the listener's socket: the launcher's, or one bound to `listen`."""
    if LISTEN_FD in os.environ:
        found = process.handed_down(LISTEN_FD, stat.S_ISSOCK)
        return socket.socket(fileno=found)
    return endpoints.listen(addresses.host_and_port("listen", settings.listen))


def share(link: Link) -> None:
    """Lets the other processes of this cluster have part in a link of the root's.

    Each of them calls `worker_link` meanwhile.
    """
    if ranks.count() > 1:
        cluster.on_end(link.abort)
        share_peer(link.peer)


def worker_link(work: activity.Work | None) -> WorkerLink:
    """Waits for a link of the root's; returns what this other process has of it.

    Args:
      work: of this process.
    """
    return WorkerLink(share_peer(None), work.trace if work else trace.OFF)
