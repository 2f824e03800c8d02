"""What a cluster needs to connect to the others of its run: settings, routes, checks.

Its own connections, with TLS or plain, or those of a federation's switches;
`all_clusters` connects clusters by them.
"""

import contextlib
import dataclasses
import functools
import os
import pathlib
import socket
import stat
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from nebula_jax import errors, installed, trace
from nebula_jax.communication import bridge, endpoints, ranks, wan
from nebula_jax.communication import listener as listener_lib
from nebula_jax.communication.link import Link
from nebula_jax.communication.wire import activity, frames, states
from nebula_jax.communication.worker_link import WorkerLink, share_peer
from nebula_jax.federation import inner, requests, switch_client, trainer_keys
from nebula_jax.runtime.life import process
from nebula_jax.runtime.ranks import cluster as cluster_lib
from nebula_jax.security import tls
from nebula_jax.security.audit import entries
from nebula_jax.security.membership import site_folder

PLAIN = (
    "tls=off: anybody on the way can read and change what crosses; accidental damage"
    " alone is noticed"
)
LISTEN_FD = "NEBULA_LISTEN_FD"  # set by the launcher: an inherited listening socket
TLS_OFF, TLS_AUTO = "off", "auto"


@dataclasses.dataclass(frozen=True)
class Settings:
    """The addresses, TLS, line and timeouts of a cluster, named like their flags."""

    listen: str = "127.0.0.1:0"
    """HOST:PORT where the listener waits; in a federation by default at the address
    from which this host reaches the switch, and at no other."""
    peer: str = ""
    """HOST:PORT of the listener, for those who dial; of several with commas between
    them. In a federation the lab that all peers have to be of, or empty."""
    tls: str = TLS_OFF
    """Credentials (see `security.tls.credentials.file`), or `off` for plain TCP."""
    federation: str = ""
    """Folder of this lab in a federation, whose switches carry what crosses; empty for
    connections of the clusters' own."""
    job: str = ""  # name by which a federation's clusters find each other
    wan: str = ""  # emulated line, such as 60mbit,15ms; empty for none
    connect_timeout: float = 60.0  # seconds to wait for the other clusters
    peer_timeout: float = 30.0  # seconds of silence until a connection counts as lost
    reconnect_timeout: float = 60.0  # seconds for a lost connection to come back
    stuck_timeout: float = 0.0  # seconds for a peer to do nothing; 0: from the steps

    def __post_init__(self) -> None:
        """Raises errors.NebulaError at what cannot work."""
        for name in ("connect_timeout", "peer_timeout"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise errors.SettingsError(f"{name}={value:g}: must be above 0 seconds")
        for name in ("reconnect_timeout", "stuck_timeout"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise errors.SettingsError(f"{name}={value:g}: must not be negative")
        wan.from_string(self.wan)
        endpoints.host_and_port("listen", self.listen)
        if self.federation:
            if self.peer and not site_folder.is_lab(self.peer):
                raise errors.SettingsError(
                    f"peer={self.peer}: with federation it is the name of a lab; for"
                    " clusters at several labs, give the job its labs in policy.json"
                )
            if entries.may_be_secret(self.job):  # which is not shown again
                raise errors.SettingsError(
                    "job: the name reads like an invitation, which the audit log"
                    " refuses: choose another"
                )
            if not requests.is_job(self.job):
                raise errors.SettingsError(
                    f"job={self.job}: expected up to 64 letters, digits, ., _ and -"
                )
        else:
            endpoints.hosts_and_ports("peer", self.peer)


def addresses(
    settings: Settings, cluster: str, dials: Sequence[str]
) -> dict[str, tuple[str, int] | None]:
    """Returns the address of each cluster that one dials; None in a federation.

    Raises errors.SettingsError if `peer` has more or fewer.
    """
    if settings.federation:
        return dict.fromkeys(dials)
    found = endpoints.hosts_and_ports("peer", settings.peer)
    if len(found) == len(dials):
        return dict(zip(dials, found, strict=True))
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
    """Raises errors.NebulaError unless it has port and credentials, or a federation."""
    if settings.federation:
        if listens or dials:
            folder = site_folder.Folder(pathlib.Path(settings.federation))
            inner.read(folder)
            trainer_keys.prepare(folder)
        return
    port = endpoints.host_and_port("listen", settings.listen)[1]
    if listens and not port and LISTEN_FD not in os.environ:
        raise errors.SettingsError(f"cluster={cluster} needs listen=HOST:PORT")
    if listens and LISTEN_FD in os.environ:
        process.handed_down(LISTEN_FD, stat.S_ISSOCK)
    if not listens and not dials:
        return
    if settings.tls == TLS_AUTO:
        raise errors.SettingsError(
            f"cluster={cluster} needs tls=FOLDER with its certificate"
            f" ({installed.COMMAND} scripts.issue_certificates makes them), or tls=off"
            " for plain TCP, which anybody on the way can read and change"
        )
    if settings.tls != TLS_OFF:
        contexts = tls.server_contexts if listens else tls.client_contexts
        contexts(pathlib.Path(settings.tls), cluster)


@functools.cache
def recorder(settings: Settings, cluster: str) -> switch_client.Recorder:
    """Returns this process's way into the audit log of its lab, if there is one."""
    folder = site_folder.Folder(pathlib.Path(settings.federation))
    if not settings.federation:
        return switch_client.Recorder(None, "", "")
    return switch_client.Recorder(folder, settings.job, cluster, process.message)


class Routes:
    """The routes of one process, the root of its cluster, while it has links."""

    def __init__(
        self,
        settings: Settings,
        hello: frames.Hello,
        check: bridge.Check = bridge.no_further_check,
        work: activity.Work | None = None,
    ) -> None:
        """Dials and listens to nobody yet; `work` is a new one if not given."""
        self.settings, self.hello, self.check = settings, hello, check
        self.work = work or activity.Work(settings.stuck_timeout)
        self._switch: switch_client.Trainer | None = None
        if settings.federation:
            self._switch = switch_client.Trainer(
                site_folder.Folder(pathlib.Path(settings.federation)),
                settings.job,
                hello.cluster,
                settings.peer,
                process.message,
            )
        report_plain(settings)

    def __enter__(self) -> "Routes":
        return self

    def __exit__(self, *_: object) -> None:
        """Ends this process's part in a federation."""
        if self._switch is not None:
            self._switch.close()

    def dial(
        self,
        peer: str,
        address: tuple[str, int] | None,
        *,
        check: bridge.Check | None = None,
        seconds: float | None = None,
        gate: Callable[[], None] = lambda: None,
    ) -> Link:
        """Connects to a cluster that listens, whose certificate must name `peer`.

        Its `address` is None in a federation. `check` is in place of that of all peers.
        Tries for `seconds`, if not as long as the settings have it; `gate` is called
        before each attempt, also when a lost connection is to come back, and raises
        bridge.ConnectError to prevent it. Raises bridge.ConnectError if nobody answers,
        or TLS fails; bridge.Mismatch if the peer runs something else.
        """
        settings, more = self.settings, self._common(tls.client_contexts)
        if self._switch is not None:
            address = inner.read(self._switch.folder)[:2]
            route = self._switch.reach(peer)
            more["finish"] = self._switch.finish(states.Role.CONNECTOR)
            more |= {"tls": self._switch.client_context, "place": switch_client.PLACE}
        else:
            assert address is not None  # it is not a federation
            route = bridge.directly(address, peer)

        def reach(timeout: float) -> tuple[socket.socket, str]:
            gate()
            return route(timeout)

        return bridge.connect(
            address,
            self.hello,
            connect_timeout=settings.connect_timeout if seconds is None else seconds,
            peer=peer,
            line=wan.from_string(settings.wan).up,
            check=check or self.check,
            route=reach,
            **more,
        )

    @contextlib.contextmanager
    def listening(
        self, clusters: Sequence[str], may_return: bool = False
    ) -> Iterator[listener_lib.Listener]:
        """Opens the listener of `clusters`; links need it for as long as they live."""
        more = self._common(tls.server_contexts)
        if self._switch is not None:
            more["finish"] = self._switch.finish(states.Role.LISTENER)
            more["tls"] = self._switch.server_context
        with listener_lib.Listener(
            listening_socket(self.settings),
            self.hello,
            clusters=clusters,
            may_return=may_return,
            line=wan.from_string(self.settings.wan).down,
            check=self.check,
            **more,
        ) as found:
            if self._switch is not None:
                self._switch.on_gone = found.give_up
                self._switch.serve(found.address[1])
            yield found

    def _common(self, contexts: Callable[..., Any]) -> dict[str, Any]:
        """Returns the arguments that both ends of a link have; plain, without `tls`."""
        found = {
            "peer_timeout": self.settings.peer_timeout,
            "reconnect_timeout": self.settings.reconnect_timeout,
            "log": process.message,
            "work": self.work,
        }
        if not self.settings.federation and self.settings.tls != TLS_OFF:
            folder = pathlib.Path(self.settings.tls)
            found["tls"] = contexts(folder, self.hello.cluster)
        return found


def report_plain(settings: Settings) -> None:
    """Prints a line if nothing protects what crosses; a launcher has printed it."""
    if settings.federation:
        return
    if settings.tls == TLS_OFF and process.LIFELINE_FD not in os.environ:
        process.message(PLAIN)


def listening_socket(settings: Settings) -> socket.socket:
    """Returns the listener's socket: the launcher's, or one bound to `listen`."""
    if LISTEN_FD in os.environ:
        found = process.handed_down(LISTEN_FD, stat.S_ISSOCK)
        return socket.socket(fileno=found)
    address = endpoints.host_and_port("listen", settings.listen)
    if settings.federation and settings.listen == Settings.listen:
        folder = site_folder.Folder(pathlib.Path(settings.federation))
        address = inner.own_host(folder), 0
    return endpoints.listen(address)


def share(link: Link) -> None:
    """Has the cluster's other processes, in `worker_link`, take part in a link."""
    if ranks.count() > 1:
        cluster_lib.on_end(link.abort)
        share_peer(link.peer)


def worker_link(work: activity.Work | None) -> WorkerLink:
    """Waits for a link of the root's; returns what this other process has of it."""
    return WorkerLink(share_peer(None), work.trace if work else trace.OFF)
