"""`--cluster=all`: every cluster as a process of this machine; see `processes`.

The launcher binds the listeners' sockets itself and hands them down, so no port can be
lost in between, and finds or makes the clusters' credentials.
"""

import contextlib
import dataclasses
import os
import pathlib
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from nebula_jax.communication import endpoints
from nebula_jax.runtime import connect
from nebula_jax.runtime.life import processes
from nebula_jax.security import names, tls
from nebula_jax.security.membership import site_folder
from nebula_jax.security.tls import certificates, credentials

Arguments = Callable[[str, connect.Settings], Sequence[str]]
"""(cluster, how it reaches the others) -> flags of its process."""


@contextlib.contextmanager
def prepared(
    workdir: pathlib.Path,
    clusters: Sequence[str],
    settings: connect.Settings,
    restarts: int = 0,
    processes_per_cluster: int = 1,
    dials: Mapping[str, Sequence[str]] | None = None,
) -> Iterator[Callable[[Sequence[str], Arguments], int]]:
    """Binds the ports and finds the credentials, so that what is wrong shows at once.

    Of `settings`, `listen` and `tls` count: the first cluster to listen does so there,
    others at free ports of the same host; with `auto`, certificates are made for the
    run. Their keys are in memory alone and end with the last process of the run,
    however it ends. All clusters are started again at most `restarts` times because one
    died (see `processes.must_restart`); each is of `processes_per_cluster` ranks
    (`cluster`). `dials` has, by cluster, those that it dials, in order, each of which
    listens (see `all_clusters.dialed`); if not given, all others dial the first.

    Yields a function of (what Python runs, as `-m` and a module, or a script's path;
    each cluster's arguments) that runs the processes of each cluster until all have
    ended. It returns their status: 0 if all ended well, 128 + n if signal n stopped
    them and none failed, else 1.
    """
    if dials is None:
        dials = {name: clusters[:1] for name in clusters[1:]}
    listens = [
        name for name in clusters if any(name in each for each in dials.values())
    ]
    with contextlib.ExitStack() as stack:
        listening = _listening(listens or clusters[:1], settings.listen, stack)
        given = connect.TLS_OFF if settings.federation else settings.tls
        own = _credentials(clusters, given, stack)
        where = {
            name: endpoints.written(each.getsockname()[:2])
            for name, each in listening.items()
        }
        connect.report_plain(settings)

        def launch(program: Sequence[str], arguments: Arguments) -> int:
            commands: dict[str, processes.Command] = {}
            for name in clusters:
                dialed = ",".join(where[each] for each in dials.get(name, ()))
                reach = dataclasses.replace(
                    settings,
                    listen=where.get(name, "127.0.0.1:0"),
                    peer=_lab(settings) or dialed,
                    tls=own[name].where,
                )
                command = [sys.executable, *program, *arguments(name, reach)]
                passed = own[name].descriptors
                commands |= _of_cluster(name, command, passed, processes_per_cluster)
            return processes.Processes(workdir, commands, listening, restarts).run()

        yield launch


def _lab(settings: connect.Settings) -> str:
    """Returns the lab of all peers in a federation: this one, since all are here."""
    if not settings.federation or settings.peer:
        return settings.peer if settings.federation else ""
    return site_folder.Folder(pathlib.Path(settings.federation)).load().name


def _of_cluster(
    name: str, command: Sequence[str], passed: Sequence[int], count: int
) -> dict[str, processes.Command]:
    """Returns a cluster's commands; the root alone has a line."""
    if count == 1:
        return {name: processes.Command(command, passed)}
    root, *others = _members(count)
    commands = {name: processes.Command([*command, *root], passed)}
    for rank, flags in enumerate(others, 1):
        without = [*command, f"--tls={connect.TLS_OFF}", *flags]
        commands[f"{name}/{rank}"] = processes.Command(without, ())
    return commands


def _listening(
    clusters: Sequence[str], address: str, stack: contextlib.ExitStack
) -> dict[str, socket.socket]:
    """Binds a socket for each cluster that listens; `stack` closes them."""
    host, port = endpoints.host_and_port("listen", address)
    found = {}
    for number, name in enumerate(clusters):
        bound = endpoints.listen((host, 0 if number else port))
        found[name] = stack.enter_context(bound)
    return found


def _members(count: int) -> list[list[str]]:
    """Returns the flags by which each process of a cluster finds the others."""
    with endpoints.listen(("127.0.0.1", 0)) as free:
        where = f"127.0.0.1:{free.getsockname()[1]}"
    return [
        [f"--coordinator={where}", f"--num_processes={count}", f"--process_id={rank}"]
        for rank in range(count)
    ]


class _Own(NamedTuple):
    where: str  # the value of --tls
    descriptors: Sequence[int] = ()  # the file in memory that it is handed


def _credentials(
    clusters: Sequence[str], given: str, stack: contextlib.ExitStack
) -> dict[str, _Own]:
    """Finds or makes the clusters' credentials; `stack` closes what is made."""
    if given == connect.TLS_OFF:
        return dict.fromkeys(clusters, _Own(connect.TLS_OFF))
    if given != connect.TLS_AUTO:
        folders = {name: pathlib.Path(given) / names.label(name) for name in clusters}
        for name, folder in folders.items():
            tls.client_contexts(folder, name)
        return {name: _Own(str(folder)) for name, folder in folders.items()}
    made = {}
    for name, issued in certificates.issue_all(clusters).items():
        descriptor = credentials.in_memory(issued)
        stack.callback(os.close, descriptor)
        made[name] = _Own(f"fd:{descriptor}", [descriptor])
    return made
