"""What a cluster needs to connect to the others of its run, checked before it starts.

`all_clusters` connects them. `routes` has the connections themselves.
"""

import functools
import os
import pathlib
import stat
from collections.abc import Sequence

from nebula_jax import errors, installed
from nebula_jax.communication import endpoints
from nebula_jax.federation import inner, switch_client, trainer_keys
from nebula_jax.runtime.connect import routes
from nebula_jax.runtime.life import process
from nebula_jax.security import tls
from nebula_jax.security.membership import site_folder

Settings = routes.Settings


def addresses(
    settings: Settings, cluster: str, dials: Sequence[str]
) -> dict[str, tuple[str, int] | None]:
    """Returns the address of each cluster that one dials; None in a federation.

    Raises:
      errors.SettingsError: if `peer` has more or fewer.
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
