"""Scenarios and their faults, drawn from a seed."""

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

from nebula_jax.communication.wire import frames
from tests.simulation import clusters, hosts


@dataclasses.dataclass(frozen=True)
class Fault:
    """An entry of a tape."""

    when: float
    kind: str
    one: str  # a cluster
    other: str = ""  # a cluster, of a fault between two
    seconds: float = 0.0
    amount: int = 0

    @property
    def until(self) -> float:
        """The time at which it is over."""
        return self.when + self.seconds


MILD = ["cut", "deafen", "flip", "stall", "refuse", "strangers"]
STRANGERS, SILENT = 20, 100  # connections at once
MILD_SECONDS = 2.0  # that they last at most
MILD_PATIENCE = 20.0  # of a run that must survive them


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A run and its faults."""

    seed: int
    shape: clusters.Shape
    latency: float  # seconds, one way
    rate: float  # bytes per second
    compute: tuple[float, ...]  # seconds of a step, or micro-batch, the leader's first
    preemption: float  # how likely a thread gives way where it need not
    peer_timeout: float
    connect_timeout: float
    reconnect_timeout: float
    stuck_timeout: float
    is_small: bool  # bounds of queues are small, so that they are come to
    tape: tuple[Fault, ...]

    @property
    def is_mild(self) -> bool:
        """True if no process has a reason to end before the run does."""
        return bool(self.tape) and self.reconnect_timeout == MILD_PATIENCE


def draw(seed: int) -> Scenario:
    """Draws a scenario: which kinds of fault there are, and how many."""
    dice = random.Random(seed)
    is_two_way = dice.random() < 0.3
    followers = 1 if is_two_way else dice.choice([1, 1, 1, 1, 2, 2, 2, 3, 4])
    if not is_two_way and dice.random() < 0.005:
        followers = 11
    shape = clusters.Shape(
        is_two_way=is_two_way,
        followers=followers,
        window=0 if is_two_way else dice.choice([0, 1, 2, 3]),
        steps=dice.randint(3, 7 if followers < 3 else 4),
        every=dice.choice([1, 2, 3, 5]),
        micro_batches=dice.choice([1, 2, 4]),
        ahead=dice.choice([1, 2, 3]),
        payload_bytes=dice.choice([16, 300, 3000, 5000, 20_000]),
    )
    names = [shape.leader, *shape.names]
    scenario = Scenario(
        seed=seed,
        shape=shape,
        latency=dice.choice([0.0005, 0.01, 0.05]),
        rate=dice.choice([2e5, 1e7]),
        compute=tuple(dice.uniform(0.01, 0.3) for _ in names),
        preemption=dice.choice([0.0, 0.0, 0.1, 0.3]),
        peer_timeout=dice.choice([1.0, 3.0]),
        connect_timeout=15.0,
        reconnect_timeout=dice.choice([0.0, 2.0, 8.0, 8.0, 8.0]),
        stuck_timeout=dice.choice([0.0, 12.0]),
        is_small=dice.random() < 0.5,
        tape=(),
    )
    horizon = 1.0 + shape.steps * 2 * max(scenario.compute)
    if dice.random() < 0.4:
        return _mild(dice, scenario, horizon)
    kinds = [kind for kind in KINDS if dice.random() < 0.3]
    times = [(kind, n) for kind in kinds for n in range(dice.choice([1, 1, 2, 4]))]
    tape = [_fault(dice, kind, dice.uniform(0.0, horizon), shape) for kind, _ in times]
    tape.sort(key=lambda fault: fault.when)
    return dataclasses.replace(scenario, tape=tuple(tape))


def _mild(dice: random.Random, scenario: Scenario, horizon: float) -> Scenario:
    """Draws faults of the line alone, which no process may end for."""
    kinds = dice.sample(MILD, dice.choice([1, 1, 2, len(MILD)]))
    tape = []
    for when in sorted(dice.uniform(0.0, horizon) for _ in range(dice.randint(1, 4))):
        fault = _fault(dice, dice.choice(kinds), when, scenario.shape)
        seconds = min(fault.seconds, MILD_SECONDS)
        tape.append(dataclasses.replace(fault, seconds=seconds))
    return dataclasses.replace(
        scenario, peer_timeout=1.0, reconnect_timeout=MILD_PATIENCE, tape=tuple(tape)
    )


def _fault(dice: random.Random, kind: str, when: float, shape: Any) -> Fault:
    follower = dice.choice(shape.names)
    ends = [shape.leader, follower]
    dice.shuffle(ends)
    return Fault(
        round(when, 3),
        kind,
        *ends,
        seconds=round(dice.choice([0.05, 0.5, 2.0, 6.0]) * dice.uniform(0.5, 1.5), 2),
        amount=dice.randint(1, 3),
    )


def simpler(scenario: Scenario) -> Iterator[Scenario]:
    """Yields scenarios that are simpler in one respect."""
    shape = scenario.shape
    least = {
        "steps": max(1, shape.steps // 2),
        "payload_bytes": 16,
        "micro_batches": 1,
        "window": 0,
    }
    for name, value in [("steps", shape.steps - 1), *least.items()]:
        if 0 <= value < getattr(shape, name) and (name != "steps" or value):
            smaller = dataclasses.replace(shape, **{name: value})
            yield dataclasses.replace(scenario, shape=smaller)
    if scenario.preemption:
        yield dataclasses.replace(scenario, preemption=0.0)
    for index, fault in enumerate(scenario.tape):
        if fault.seconds > 0.1:
            shorter = dataclasses.replace(fault, seconds=round(fault.seconds / 2, 3))
            tape = (*scenario.tape[:index], shorter, *scenario.tape[index + 1 :])
            yield dataclasses.replace(scenario, tape=tape)


def apply(simulation: Any, fault: Fault) -> None:
    simulation.world.note(f"fault: {fault}")
    KINDS[fault.kind](simulation, fault)


def _cut(simulation: Any, fault: Fault) -> None:
    """Resets the connections between two."""
    for sock in simulation.network.between(fault.one, fault.other):
        sock.reset()


def _stall(simulation: Any, fault: Fault) -> None:
    """Lets nothing pass between two for a while."""
    for ends in ((fault.one, fault.other), (fault.other, fault.one))[: fault.amount]:
        simulation.network.line(*ends).down_until = simulation.world.now + fault.seconds


def _deafen(simulation: Any, fault: Fault) -> None:
    """Lets nothing reach one end of the connections any more."""
    for sock in simulation.network.between(fault.one, fault.other):
        sock.is_deaf = True


def _refuse(simulation: Any, fault: Fault) -> None:
    """Cuts connections, and refuses new ones for a while."""
    for one, other in ((fault.one, fault.other), (fault.other, fault.one)):
        simulation.network.line(one, other).refused_until = fault.until
    _cut(simulation, fault)


def _crash(simulation: Any, fault: Fault) -> None:
    """Kills a process; its system closes what it had open."""
    simulation.machines[fault.one].kill(137)


def _lose_host(simulation: Any, fault: Fault) -> None:
    """Turns a machine off for a while."""
    simulation.machines[fault.one].kill(137, is_gone=True, away=fault.seconds)


def _pause(simulation: Any, fault: Fault) -> None:
    process = simulation.machines[fault.one].process
    process.pause()

    def go_on() -> None:
        process.go_on()
        for stranger in simulation.strangers:
            stranger.wait_longer()

    simulation.world.at(fault.until, go_on)


def _stop(simulation: Any, fault: Fault) -> None:
    simulation.machines[fault.one].cluster.is_to_stop = True


def _fill_disk(simulation: Any, fault: Fault) -> None:
    disk = simulation.machines[fault.one].disk
    disk.is_full = True
    simulation.world.at(fault.until, setattr, disk, "is_full", False)


def _fail_disk(simulation: Any, fault: Fault) -> None:
    """Makes a disk fail for a while, whatever it is to do."""
    disk = simulation.machines[fault.one].disk
    disk.is_failing = simulation.is_damaged = True
    simulation.world.at(fault.until, setattr, disk, "is_failing", False)


def _damage(simulation: Any, fault: Fault) -> None:
    """Damages a file of a finished checkpoint, though neither while it is written and
    digested nor between its verification and reading it: production code takes each of
    these for one moment."""
    machine = simulation.machines[fault.one]
    if machine.is_opening:
        simulation.world.at(simulation.world.now + 0.1, _damage, simulation, fault)
        return
    found = machine.disk.glance(machine.folder)
    names = sorted(name for name in found if name.isdigit())
    if names:
        simulation.is_damaged = True
        name = names[-1 - (fault.amount - 1) % len(names)]
        machine.disk.damage(machine.folder / name, fault.amount % 3)


def _flip(simulation: Any, fault: Fault) -> None:
    """Flips a bit of something that crosses."""
    simulation.network.line(fault.one, fault.other).flips += 1


def _stick(simulation: Any, fault: Fault) -> None:
    """Lets a cluster compute without end; its threads go on."""
    is_any = any(each.is_stuck for each in simulation.machines.values())
    if simulation.scenario.stuck_timeout and not is_any:  # else nobody is left to wait
        simulation.machines[fault.one].is_stuck = True


def _strangers(simulation: Any, fault: Fault) -> None:
    """Sends others to the leader: silent, or with a frame that opens nothing."""
    opening = frames.encode(frames.Open(b"a stranger's id.", 0), 0, 0)
    data = (b"", b"".join(opening), b"GET / HTTP/1.1\r\n" * 20)[fault.amount - 1]
    count = STRANGERS if data else SILENT
    stranger = hosts.Stranger(simulation, data, count)
    simulation.strangers.append(stranger)
    simulation.world.at(simulation.world.now + 60.0, stranger.process.end)


def _clone(simulation: Any, fault: Fault) -> None:
    """Starts a follower a second time, on a copy of its disk, for a while."""
    names = simulation.shape.names
    name = fault.one if fault.one in names else fault.other
    clone = hosts.Machine(simulation, name, f"clone of {name}")
    clone.disk.clone(simulation.machines[name].disk)
    simulation.clones.append(clone)
    simulation.is_damaged = True  # what it saves, the true one does not have
    clone.start()
    simulation.world.at(fault.until, clone.kill, 137)


KINDS = {
    "cut": _cut,
    "stall": _stall,
    "deafen": _deafen,
    "refuse": _refuse,
    "crash": _crash,
    "lose_host": _lose_host,
    "pause": _pause,
    "stop": _stop,
    "flip": _flip,
    "fill_disk": _fill_disk,
    "fail_disk": _fail_disk,
    "damage": _damage,
    "stick": _stick,
    "strangers": _strangers,
    "clone": _clone,
}
