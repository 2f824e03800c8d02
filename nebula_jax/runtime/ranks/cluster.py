"""A cluster of several processes: one program, of which no part is lost in silence.

    status = cluster.run(settings, described, train)

Rank 0, the root, waits at the coordinator's address for the others, which prove that
they are of this run and keep their connection to it (`rendezvous`). A process that ends
closes its own at once; one that hangs no longer beats, or gets nothing done
(`members`). So nobody waits for it in a collective, which has no timeout. JAX's own
service would end the others by a crash that names nobody: a long timeout and a
connection that does not break (`proxy`) keep it from that. Tensors go by collectives
that check nobody: the network between a cluster's hosts has to be its own.
"""

import contextlib
import dataclasses
import functools
import ipaddress
import os
import pathlib
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

# Private: nothing public returns what Slurm, Open MPI or Kubernetes have set, which
# coordinator=auto needs before jax.distributed begins, or that it is too late for it.
from jax._src import clusters, xla_bridge

from nebula_jax import errors
from nebula_jax.communication import endpoints, ranks
from nebula_jax.communication.wire import activity
from nebula_jax.runtime.life import process
from nebula_jax.runtime.ranks import members as members_lib
from nebula_jax.runtime.ranks import proxy, rendezvous
from nebula_jax.security import shared_secret

AUTO = "auto"
COLLECTIVE_ERRORS = (jax.errors.JaxRuntimeError, ValueError)
"""Errors of JAX if one fails, in a computation or where its result is read."""
SERVICE_SECONDS = 10.0  # to reach JAX's service, before JAX tries again
JAX_SECONDS = 3600  # of silence, until JAX's service ends the processes
TASKS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
"""Variables of the environment: how many processes were started as this one was."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """The processes of a cluster, named like their flags."""

    coordinator: str = ""
    """HOST:PORT of the root; `auto` for what Slurm, Open MPI or Kubernetes have set;
    empty for a cluster of one process."""
    num_processes: int = 0  # P
    process_id: int = -1  # rank of this process
    connect_timeout: float = 60.0  # seconds to wait for the others
    peer_timeout: float = 30.0  # seconds of silence until a process counts as lost
    workdir: pathlib.Path = pathlib.Path()  # has the secret if the environment has none


_members: members_lib.Members | None = None


def watch(work: activity.Work, interrupt: process.Interrupt) -> None:
    """Shows the cluster how far this process is, and the root its interrupts too."""
    if _members is not None:
        _members.work, _members.interrupt = work, interrupt
        interrupt.hear()


def on_end(abort: Callable[[str], None]) -> None:
    """Has `abort` called with the reason if a process of this cluster is lost."""
    if _members is not None:
        _members.aborts.append(abort)


def run(
    settings: Settings, described: Mapping[str, Any], train: Callable[[], int]
) -> int:
    """Runs this process's part of the cluster; returns its exit status.

    `described` must be equal in all of them: JSON values by name. `train` does the
    work, with JAX on the devices of all processes, and returns the status. Raises
    rendezvous.Absent if some process did not come; errors.SettingsError if they are not
    the processes of one run.
    """
    if not settings.coordinator:
        _check_alone()
        return train()
    place = _place_of(settings)
    if place.processes == 1:
        return train()
    if xla_bridge.backends_are_initialized():
        raise errors.SettingsError(
            "coordinator: JAX has computed before the processes of this cluster meet,"
            " perhaps when the script was imported: leave that to its roles"
        )
    members = members_lib.Members(place.rank, settings.peer_timeout)
    _join(settings, place, described, members)
    try:
        status = process.guarded(lambda: _train(train, members), members.fail)
    except BaseException as error:
        members.fail(f"{type(error).__name__}: {error}")
        with contextlib.suppress(OSError, ValueError):  # nobody may read it
            traceback.print_exc()
        status = 1
    if members.have_left:
        jax.distributed.shutdown()
        return status
    process.exit_now(status)  # JAX's own end would wait for the others, and crash


def _join(
    settings: Settings,
    place: "_Place",
    described: Mapping[str, Any],
    members: members_lib.Members,
) -> None:
    """Meets the other processes, which `members` watches from then on; begins JAX."""
    global _members
    timeout, address = settings.connect_timeout, place.address
    secret = rendezvous.secret_of_run(settings.workdir)
    if place.rank == 0:
        door = rendezvous.Door(
            _listen(address, timeout), secret, endpoints.written(address)
        )
        lines = rendezvous.gather(door, place.processes, described, timeout)
        reach = functools.partial(_reach, door)
    else:
        line = rendezvous.attend(
            address, secret, place.rank, place.processes, described, timeout
        )
        lines = {0: line}
        reach = functools.partial(_reach_by_door, address, secret, place.rank)
    _members = members
    members.watch(lines)
    if place.rank:
        _begin_jax("", proxy.open_to(reach), place, timeout)
        return
    # The path of a socket has at most 107 bytes.
    where = "/tmp" if len(tempfile.gettempdir()) > 60 else None
    with tempfile.TemporaryDirectory(prefix="nebula-", dir=where) as folder:
        door.service = f"{folder}/service"  # where this user alone comes
        _begin_jax(door.service, proxy.open_to(reach), place, timeout)
        # Open, it is reached without the folder, which a kill would leave behind.
        door.service = f"/proc/self/fd/{os.open(door.service, os.O_PATH)}"


def _reach(door: rendezvous.Door) -> socket.socket:
    """Connects the root to JAX's service."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.connect(door.service)
    except OSError:
        sock.close()
        raise
    return sock


def _reach_by_door(address: tuple[str, int], secret: bytes, rank: int) -> socket.socket:
    """Connects another process to JAX's service, which the root may yet begin."""
    deadline = time.monotonic() + SERVICE_SECONDS
    while True:
        with contextlib.suppress(ConnectionError):
            return rendezvous.knock(
                address, secret, rank, shared_secret.SERVICE, deadline
            )
        if time.monotonic() > deadline:
            raise TimeoutError("JAX's service does not begin")
        time.sleep(0.05)


def _train(train: Callable[[], int], members: members_lib.Members) -> int:
    """Calls `train`; raises the reason if it fails because another process has gone."""
    try:
        status = train()
        if status in process.SAVED:
            members.leave()
        return status
    except (errors.NebulaError, OSError, *COLLECTIVE_ERRORS) as error:
        if isinstance(error, COLLECTIVE_ERRORS):
            # A collective fails if a process is gone, of which the news may come.
            members.wait_for_reason()
        if members.reason:  # what failed here is a consequence
            raise rendezvous.Absent(members.reason) from None
        raise


def _check_alone() -> None:
    """Raises errors.SettingsError if this process is one of several tasks."""
    for name in TASKS:
        if os.environ.get(name, "1") not in ("", "1"):
            raise errors.SettingsError(
                f"this is one of {name}={os.environ[name]} processes, each of which"
                " would train alone; coordinator=auto makes one cluster of them"
            )


class _Place(NamedTuple):
    address: tuple[str, int]  # the coordinator's
    processes: int
    rank: int
    device_ids: Sequence[int] | None  # of this host that it uses; None for all


def _place_of(settings: Settings) -> _Place:
    """Returns the place that the flags, or what started this process, give it."""
    processes, rank = settings.num_processes, settings.process_id
    if settings.coordinator == AUTO:
        return _detected(settings.connect_timeout)
    if processes < 1 or not 0 <= rank < processes:
        raise errors.SettingsError(
            f"coordinator needs num_processes and process_id from 0 to one less;"
            f" there are num_processes={processes} process_id={rank}"
        )
    address = endpoints.host_and_port("coordinator", settings.coordinator)
    return _Place(address, processes, rank, None)


def _detected(timeout: float) -> _Place:
    """Returns what Slurm, Open MPI or Kubernetes have set, as JAX reads it."""
    try:
        detected = clusters.ClusterEnv.auto_detect_unset_distributed_params(
            None, None, None, None, None, int(timeout)
        )
        where, processes, rank, device_ids = detected
    except (RuntimeError, ValueError, KeyError) as error:
        raise errors.SettingsError(f"coordinator=auto: {error}") from None
    if where is None or processes is None or rank is None:
        raise errors.SettingsError(
            "coordinator=auto: JAX finds no Slurm step, Open MPI run or Kubernetes"
            " job here; give coordinator, num_processes and process_id"
        )
    address = endpoints.host_and_port("coordinator", where)
    return _Place(address, processes, rank, device_ids)


def _listen(address: tuple[str, int], timeout: float) -> socket.socket:
    """Returns the coordinator's socket, which listens at its address alone."""
    where = endpoints.written(address)
    deadline = time.monotonic() + timeout
    with contextlib.suppress(UnicodeError):  # no name: `listen` says so
        while time.monotonic() < deadline:
            try:
                socket.getaddrinfo(*address)
                break
            except socket.gaierror:  # a pod's name is known a while after its start
                time.sleep(rendezvous.RETRY_SECONDS)
    try:
        server = endpoints.listen(address)
    except endpoints.CannotListen as error:
        raise errors.NebulaError(
            f"coordinator={where}: {error}; it has to be an address of process 0's host"
        ) from None
    bound = server.getsockname()[0]
    is_name = address[0] not in (bound, "localhost")
    if is_name and ipaddress.ip_address(bound).is_loopback:
        process.message(
            f"coordinator={where} is {bound} on this host, to which no other host"
            " comes: if there are others, name an address that they reach"
        )
    return server


def _begin_jax(
    service: str, proxied: str, place: _Place, connect_timeout: float
) -> None:
    """Makes one program of all processes; JAX's `service` is reached at `proxied`."""
    # JAX's handler would swallow SIGTERM.
    jax.config.update("jax_enable_preemption_service", False)
    # Two collectives at once, of one process, may wait for each other on CPUs.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    jax.distributed.initialize(
        proxied,
        place.processes,
        place.rank,
        place.device_ids,
        cluster_detection_method="deactivate",
        initialization_timeout=int(connect_timeout),
        heartbeat_timeout_seconds=JAX_SECONDS,
        shutdown_timeout_seconds=int(connect_timeout),
        # Elsewhere anybody who reaches the port could take a process's place.
        coordinator_bind_address=f"unix:{service}",
    )
    with _quiet():
        ranks.agree(0)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps from standard output what Gloo prints when it connects."""
    sys.stdout.flush()
    before, nothing = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    try:
        yield
    finally:
        os.dup2(before, 1)
        os.close(before)
        os.close(nothing)
