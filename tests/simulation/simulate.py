"""One simulated run: clusters, their supervisor, faults, and the promises that hold."""

import functools
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

from nebula_jax import disk as real_disk
from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication.wire import receive_queue, windows
from nebula_jax.runtime import connect
from nebula_jax.runtime.life import process as process_lib
from nebula_jax.training import checkpoint, checkpoint_files
from tests.simulation import (
    bugs,
    clusters,
    disk,
    faults,
    hosts,
    machine,
    network,
    world,
)

MANY_BYTES = 5000  # a tensor of which each counts for the bounds below
SMALL = (  # bounds that short runs with small tensors come to
    (receive_queue, "MAX_BYTES", 4 << 10),
    (windows, "WINDOW_BYTES", 8 << 10),
    (windows, "ACK_BYTES", 2 << 10),
    (windows, "ACK_FRAMES", 4),
)
PATIENCE = 400.0  # seconds from the last fault's end to the end of the run
BLAME = re.compile(r"error: .* (sent|acknowledged|opened|came back with) ")
FOR_EVER = 1e6
FILES_OF_A_PROCESS, FILES_OF_A_LINK = 8, 6
DISK_FUNCTIONS = (
    *("names", "files", "read", "digest", "write", "sync", "rename", "remove"),
    "make_folder",
)
REFUSAL = re.compile(r"none that can be used|no step is saved in all")


@functools.cache
def payload_spec(codec: codec_lib.Codec, spec: codec_lib.Spec) -> codec_lib.Payload:
    """Computes what `codec.payload_spec` does, once."""
    return PAYLOAD_SPEC(codec, spec)


PAYLOAD_SPEC = codec_lib.payload_spec


class Simulation:
    """A run of one scenario."""

    def __init__(
        self, scenario: faults.Scenario, bug: Sequence[bugs.Patch] = ()
    ) -> None:
        """Makes a run; bug: patches of production code."""
        self.bug = bug
        self.scenario = scenario
        self.shape = scenario.shape
        self.world = world.World(scenario.seed, scenario.preemption)
        self.network = network.Network(
            self.world, lambda: network.Line(scenario.latency, scenario.rate)
        )
        self.settings = connect.Settings(
            listen=f"{self.shape.leader}:7070",
            peer=f"{self.shape.leader}:7070",
            connect_timeout=scenario.connect_timeout,
            peer_timeout=scenario.peer_timeout,
            reconnect_timeout=scenario.reconnect_timeout,
            stuck_timeout=scenario.stuck_timeout,
        )
        self.expected = clusters.expected(self.shape)
        self.machines = {
            name: hosts.Machine(self, name)
            for name in (self.shape.leader, *self.shape.names)
        }
        self._floor = 0  # the newest step that all have saved
        self.strangers: list[hosts.Stranger] = []
        self.clones: list[hosts.Machine] = []
        self.is_refused = False  # clusters refuse to go on with what is left
        self.is_damaged = False  # a checkpoint was damaged: the run may be refused
        self._led = 0  # the newest step whose token may have left
        self._seconds = dict(zip(self.machines, scenario.compute, strict=False))

    def run(self) -> None:
        """Runs it to its end; raises world.Violation if a promise does not hold."""
        machine.world, machine.network = self.world, self.network
        with machine.installed(
            (codec_lib, "payload_spec", payload_spec),
            (process_lib, "message", self.message),
            *(SMALL if self.scenario.is_small else ()),
            (checkpoint, "save", self.write),
            (checkpoint, "restore", self.read),
            (checkpoint, "abstract", lambda *_: None),
            *((real_disk, name, self._of_disk(name)) for name in DISK_FUNCTIONS),
            *(
                (where, name, change(vars(where)[name]))
                for where, name, change in self.bug
            ),
        ):
            try:
                for each in self.machines.values():
                    each.start()
                for fault in self.scenario.tape:
                    self.world.at(fault.when, faults.apply, self, fault)
                healed = max([0.0, *(each.until for each in self.scenario.tape)])
                self.world.run(healed + PATIENCE)
                self._check_end()
            finally:
                others = [*self.clones, *self.strangers]
                for each in [*self.machines.values(), *others]:
                    each.process.end()

    def _of_disk(self, name: str) -> Callable[..., Any]:
        return lambda *args: getattr(self.disk(), name)(*args)

    def note_end(self) -> None:
        self.world.is_over = all(each.status == 0 for each in self.machines.values())

    def _check_end(self) -> None:
        if self.is_refused:
            return
        for each in self.machines.values():
            if each.reached[0] != self.shape.steps:
                text = f"{each.name} ended well after step {each.reached[0]}"
                raise world.Violation(text)

    def message(self, text: str) -> None:
        """Takes what a process prints; nobody is to blame where all are honest."""
        if BLAME.search(text):
            self.world.fail(text)
        if REFUSAL.search(text):
            self._refused(text)
        self.world.note(f"{self.world.process().host}: {text}")

    def _refused(self, text: str) -> None:
        """Ends the run: a person has to decide, and rightly so."""
        common = set.intersection(*(each.good() for each in self.machines.values()))
        if not self.is_damaged or (common and not self.is_failing()):
            self.world.fail(f"{text}; good are {sorted(common)}")
        self.world.is_over = self.is_refused = True

    def is_failing(self) -> bool:
        """Returns True if a disk fails at present."""
        return any(each.disk.is_failing for each in self.machines.values())

    # What trainers report.

    def starts(self, step: int) -> None:
        """Checks where a run goes on: no step is lost that all had saved."""
        self._led = max(self._led, step)
        good = [each.good() for each in self.machines.values()]
        if not self.is_damaged and step < self._floor:
            self.fail(f"goes on after step {step}, though all saved step {self._floor}")
        for each, left in zip(self.machines.values(), good, strict=True):
            if each.has_checkpoints() and not left and not self.clones:
                self.fail(f"goes on, though {each.name} has damaged checkpoints alone")
        if step not in {0}.union(*good):
            self.fail(f"goes on after step {step}, of which nothing good is there")

    def begins(self, cluster: clusters.Cluster, step: int, links: Sequence) -> None:
        """Checks that a cluster may begin a step, and that its queues are short."""
        if cluster.name != self.shape.leader:
            ahead = step - 1 - self._led
            window = 0 if self.shape.is_two_way else self.shape.window
            if ahead > window:
                self.fail(f"{cluster.name} is {ahead} steps ahead of the tokens")
        for link in links:
            self.check_memory(link)
        held = len(cluster.machine.process.descriptors)
        most = FILES_OF_A_PROCESS + FILES_OF_A_LINK * len(links)
        if held > most + sum(each.open for each in self.strangers if each.may_stay):
            self.fail(f"{cluster.name} holds {held} descriptors")

    def check_memory(self, link: Any) -> None:
        """Checks that no more waits in a link than it may."""
        if not self.scenario.is_small or self.shape.payload_bytes < MANY_BYTES:
            return
        waiting, sent = link._queue.tensors, link._session.window._tensors
        if waiting > receive_queue.MAX_TENSORS + 1:
            self.fail(f"{waiting} tensors wait to be taken")
        if sent > windows.WINDOW_TENSORS:
            self.fail(f"{sent} tensors wait for an acknowledgement")

    def compute(self, cluster: clusters.Cluster) -> None:
        """Takes the time of a step or micro-batch."""
        seconds = self._seconds[cluster.name]
        self.world.sleep((), FOR_EVER if cluster.machine.is_stuck else seconds)

    def reached(self, cluster: clusters.Cluster, step: int, state: bytes) -> None:
        if state != self.expected[cluster.name][step]:
            self.fail(f"{cluster.name} has another state after step {step}")
        cluster.machine.reached = (step, state)

    def restored(self, cluster: clusters.Cluster, step: int, state: bytes) -> None:
        """Checks the state that a cluster goes on from; later ones come again."""
        machine = cluster.machine
        machine.is_opening = False
        machine.saved = {saved for saved in machine.saved if saved <= step}
        self.reached(cluster, step, state)

    def leads(self, step: int) -> None:
        """Notes that the token of a step may leave."""
        self._led = max(self._led, step)

    # Checkpoints on simulated disks.

    def disk(self) -> disk.Disk:
        """Returns the disk of the process that runs."""
        return self.world.process().machine.disk

    def write(
        self,
        saved: checkpoint_files.Folder,
        step: int,
        state: bytes,
        about: Any,
        keep: int,
    ) -> None:
        """Does what `checkpoint.save` does; the state takes the place of arrays."""
        machine = self.world.process().machine

        def write_arrays(folder: pathlib.Path) -> None:
            machine.disk.write(folder / "arrays", state)

        saved.save(step, about, write_arrays, keep)
        machine.saved.add(step)
        self._raise_floor()

    def _raise_floor(self) -> None:
        common = set.intersection(*(each.saved for each in self.machines.values()))
        self._floor = max(self._floor, *common, 0)

    def read(self, folder: pathlib.Path, step: int, like: Any) -> tuple[bytes, Any]:
        """Does what `checkpoint.restore` does."""
        state = self.disk().read(folder / f"{step:08d}" / "arrays")
        return state, checkpoint_files.about(folder, step)

    def fail(self, what: str) -> None:
        """Ends the run: a promise is broken."""
        raise world.Violation(what)
