"""The machines of a simulated run: a cluster's, with its supervisor, and others'."""

import contextlib
import pathlib
from typing import Any

from nebula_jax.runtime.life import process as process_lib
from nebula_jax.runtime.records import run_folder
from nebula_jax.training import checkpoint_files
from tests.simulation import clusters, disk, world

SILENT_SECONDS = 25.0  # that a connection may take to open a session, and some more
DROP_SECONDS = 3.0  # until one is closed that sent what no cluster sends
RESTART_SECONDS = 1.0  # until the supervisor starts a process again


class Machine:
    """The machine of one cluster, with a supervisor who starts its process again."""

    def __init__(self, simulation: Any, name: str, host: str = "") -> None:
        """Makes the machine of the cluster `name`, its process not started; host: its
        own name, if it is a clone; nobody supervises it then."""
        self.simulation, self.name, self.host = simulation, name, host or name
        self.is_clone = bool(host)
        self.world = simulation.world
        self.process = world.Process(self.world, self)
        self.process.is_dead = True
        self.status: int | None = None  # of the last process; None while one runs
        self.reached = (0, b"")
        self.disk = disk.Disk(simulation.scenario.seed, self.world.spend)
        self.is_stuck = False  # its computing does not come to an end
        self.is_opening = False  # checkpoints are verified, and none is restored yet
        self.saved: set[int] = set()  # steps whose checkpoint was reported as saved

    @property
    def folder(self) -> pathlib.Path:
        """The cluster's checkpoints on its disk."""
        return run_folder.of_cluster(clusters.WORKDIR, self.name) / "checkpoints"

    def good(self) -> set[int]:
        """Returns the steps whose checkpoint is whole and has the right state."""
        expected = self.simulation.expected[self.name]
        return {
            int(name)
            for name, files in self.disk.glance(self.folder).items()
            if name.isdigit()
            and _is_manifest(files.get(checkpoint_files.MANIFEST, b""), int(name))
            and files.get("arrays") == expected[int(name)]
        }

    def has_checkpoints(self) -> bool:
        """Returns True if there are any, good or not."""
        return any(name.isdigit() for name in self.disk.glance(self.folder))

    def start(self) -> None:
        """Starts the process, unless one runs."""
        if not self.process.is_dead:
            return
        self.simulation.network.gone.discard(self.host)
        self.status, self.is_opening = None, True
        self.process = world.Process(self.world, self)
        self.cluster = clusters.Cluster(self.simulation, self)
        self.process.start(self._main)

    def _main(self) -> None:
        process = self.process
        status = process_lib.guarded(self.cluster.run)
        self.world.note(f"{self.host}: exit status {status}")
        self.world.at(self.world.now, self._ended, process, status)

    def _ended(self, process: world.Process, status: int) -> None:
        if process is self.process and not process.is_dead:
            if status and self.simulation.scenario.is_mild:
                what = f"{self.name} ended with {status} for faults to be survived"
                self.world.fail(what)
            self.kill(status)

    def kill(self, status: int, is_gone: bool = False, away: float = 0.0) -> None:
        """Ends the process, if one runs; the supervisor then starts it again."""
        if self.process.is_dead:
            return
        if is_gone:
            self.simulation.network.gone.add(self.host)
            self.disk.lose_power()
        self.process.end(is_gone)
        self.status, self.is_opening, self.is_stuck = status, False, False
        if self.is_clone:
            return
        self.simulation.note_end()
        if status:
            self.world.at(self.world.now + RESTART_SECONDS + away, self._restart)

    def _restart(self) -> None:
        self.start()
        for each in self.simulation.machines.values():
            if each.is_stuck:  # the others have named it
                each.kill(137)
            if each.status == 0:  # it had ended well, and is wanted again
                each.start()


class Stranger:
    """A process of nobody's that connects to the leader, many times."""

    def __init__(self, simulation: Any, data: bytes, count: int) -> None:
        """Connects `count` times, sends `data` each time, and waits for the end."""
        self.host, self._leader = "stranger", simulation.shape.leader
        self._network, self._data = simulation.network, data
        self._seconds = DROP_SECONDS if data else SILENT_SECONDS
        self._until = simulation.world.now + self._seconds
        self.open = count  # connections that have not ended
        self.process = world.Process(simulation.world, self)
        for _ in range(count):
            self.process.start(self._connect)

    @property
    def may_stay(self) -> bool:
        """True if the leader may still have its connections."""
        return self.process.world.now < self._until

    def wait_longer(self) -> None:
        """Notes that the leader may have been paused until now."""
        self._until = self.process.world.now + self._seconds

    def _connect(self) -> None:
        with contextlib.suppress(OSError):
            sock = self._network.connect(self._leader, 5.0)
            sock.sendall(self._data)
            while sock.recv(1 << 12):
                pass
            sock.close()
        self.open -= 1


def _is_manifest(data: bytes, step: int) -> bool:
    try:
        checkpoint_files.decode_manifest(data, step)
    except ValueError:
        return False
    return True
