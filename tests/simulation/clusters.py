"""The toy trainers: what an experiment does, with a hash in place of a model.

A cluster's state after step t is a hash of its state before, of t and of every byte it
received for t. So a frame that is lost, doubled, out of order or altered changes all
that follows, and what should have come out can be computed without any line.
"""

import dataclasses
import hashlib
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from nebula_jax.communication import codec, selector
from nebula_jax.communication.wire import activity, frames
from nebula_jax.parallel import pace, pipeline
from nebula_jax.runtime.connect import all_clusters
from nebula_jax.runtime.records import checkpoints

STATE_BYTES = 16
IDENTITY = codec.identity()
WORKDIR = pathlib.Path("/run")


class Fresh(NamedTuple):
    """A `mesh.ShardedInit` without a mesh."""

    name: str
    shapes: None = None
    sharding: None = None

    def init(self) -> bytes:
        return chain(self.name)


@dataclasses.dataclass(frozen=True)
class Shape:
    """The run that the clusters have agreed on."""

    is_two_way: bool  # front and back, as in ABNet; else generators and discriminator
    followers: int
    window: int
    steps: int
    every: int  # steps between checkpoints
    micro_batches: int
    ahead: int
    payload_bytes: int

    @property
    def leader(self) -> str:
        """The name of the cluster that listens."""
        return "target" if self.is_two_way else "discriminator"

    @property
    def names(self) -> list[str]:
        """The clusters that dial."""
        if self.is_two_way:
            return ["source"]
        return [f"generator:{index}" for index in range(self.followers)]

    @property
    def spec(self) -> jax.ShapeDtypeStruct:
        """The arrays of every channel."""
        return jax.ShapeDtypeStruct((self.payload_bytes,), np.uint8)

    def is_evaluated(self, step: int) -> bool:
        """Returns True if held-out text crosses after a step."""
        return step % self.every == 0 and not self.is_two_way

    def each_of(self, channels: Sequence[Any]) -> list[tuple[Any, int]]:
        """Returns each channel with each of its micro-batches, in order."""
        return [(each, n) for each in channels for n in range(self.micro_batches)]


def chain(*parts: Any) -> bytes:
    """Returns a hash of strings, numbers and bytes: the next state."""
    digest = hashlib.blake2b(digest_size=STATE_BYTES)
    for part in parts:
        digest.update(part if isinstance(part, bytes) else repr(part).encode())
    return digest.digest()


def payload(shape: Shape, *parts: Any) -> np.ndarray:
    """Returns [payload_bytes] uint8 that depend on all parts."""
    piece = chain(*parts)
    repeated = piece * -(-shape.payload_bytes // STATE_BYTES)
    return np.frombuffer(repeated[: shape.payload_bytes], np.uint8)


def expected(shape: Shape) -> dict[str, list[bytes]]:
    """Computes the states of every cluster after 0, 1, 2, ... steps, without a line."""
    names = [shape.leader, *shape.names]
    states = {name: [Fresh(name).init()] for name in names}
    for step in range(1, shape.steps + 1):
        now = {name: states[name][-1] for name in names}
        if shape.is_two_way:
            front, back = now["source"], now["target"]
            hidden = [
                payload(shape, front, step, number).tobytes()
                for number in range(shape.micro_batches)
            ]
            gradient = [payload(shape, back, each).tobytes() for each in hidden]
            states["source"].append(chain(front, step, *gradient))
            states["target"].append(chain(back, step, *hidden))
            continue
        sent = []
        for name in shape.names:
            states[name].append(chain(now[name], step))
            sent.append(payload(shape, states[name][-1]).tobytes())
        state = chain(now[shape.leader], step, *sent)
        if shape.is_evaluated(step):
            for name, number in shape.each_of(shape.names):
                data = payload(shape, states[name][-1], number).tobytes()
                state = chain(state, data)
        states[shape.leader].append(state)
    return states


class Cluster:
    """What a program of a cluster has of its machine and of the simulation."""

    def __init__(self, simulation: Any, machine: Any) -> None:
        self.simulation, self.machine, self.name = simulation, machine, machine.name
        world, settings = simulation.world, simulation.settings
        self.work = activity.Work(settings.stuck_timeout, lambda: world.now)
        self.shape: Shape = simulation.scenario.shape
        self.leads = self.name == self.shape.leader
        self.is_to_stop = False

    def stop_requested(self) -> bool:
        return self.is_to_stop

    def saved(self) -> checkpoints.Checkpoints:
        """Opens the cluster's checkpoints."""
        shape = self.shape
        settings = {"shape": repr(shape)}
        return checkpoints.Checkpoints(
            WORKDIR, self.name, settings, shape.every, shape.window, work=self.work
        )

    def restore(self, saved: checkpoints.Checkpoints, step: int) -> bytes:
        state, _ = saved.restore(step, Fresh(self.name))
        self.simulation.restored(self, step, state)
        return state

    def reached(self, step: int, state: bytes) -> None:
        self.simulation.reached(self, step, state)
        self.work.step_done()

    def hello(self, saved: checkpoints.Checkpoints) -> frames.Hello:
        settings = {"shape": repr(self.shape)}
        return frames.Hello(self.name, "simulated", settings, tuple(saved.steps))

    def run(self) -> int:
        """Trains to the end; returns the exit status."""
        shape, watch, work = self.shape, self.simulation, self.work
        saved, settings = self.saved(), watch.settings
        hello, names = self.hello(saved), [shape.leader, self.name]
        if self.leads:
            settings = dataclasses.replace(settings, peer="")
            names = [shape.leader, *shape.names]
        with all_clusters.connected(settings, hello, names, work=work) as peers:
            links = list(peers.links.values())
            train = OPENED[self.name.partition(":")[0]](self, links)
            start = self.start(saved, links)
            state = self.restore(saved, start)
            work.begin()
            step, (steps, done) = start, self.pace(start, links)
            for step in steps:
                watch.begins(self, step, links)
                state = train(step, state, done)
                self.reached(step, state)
                saved.after(step, state)
            saved.at_end(step, state)
            if not self.leads:
                links[0].wait_for_step(step)
        return 0 if step >= shape.steps else 3

    def start(self, saved: checkpoints.Checkpoints, links: Sequence[Any]) -> int:
        """Returns the step that all go on after, which the leader finds."""
        watch, shape = self.simulation, self.shape
        if not self.leads:
            return links[0].wait_for_welcome(watch.settings.connect_timeout)
        steps = {link.peer.cluster: link.peer.checkpoints for link in links}
        steps |= {self.name: saved.steps}
        start = checkpoints.newest_of_all(steps, shape.every, shape.window)
        watch.starts(start)
        for link in links:
            link.welcome(start)
        return start

    def pace(
        self, start: int, links: Sequence[Any]
    ) -> tuple[Iterable[int], Callable[[int], None]]:
        """Returns the steps, and what lets the others go on after one."""
        shape, watch = self.shape, self.simulation
        given = start, shape.steps, shape.window, self.stop_requested
        if not self.leads:
            return pace.follow(links[0], *given), lambda step: None
        steps = pace.Lead(links, *given, watch.message)

        def done(step: int) -> None:
            watch.leads(step)
            steps.done(step)

        return steps, done


# Each opens a cluster's channels, and returns a function of a step, the state before
# it, and what lets the others go on, which returns the state after it.


def discriminator(cluster: Cluster, links: Sequence[Any]) -> Callable[..., bytes]:
    """Learns from generators; see experiments/m3/discriminator.py."""
    shape = cluster.shape
    tokens = [link.receiver("tokens", shape.spec, IDENTITY) for link in links]
    held_out = [link.receiver("held_out", shape.spec, IDENTITY) for link in links]

    def train(step: int, state: bytes, done: Callable[[int], None]) -> bytes:
        received = [take(each, step) for each in tokens]
        cluster.simulation.compute(cluster)
        state = chain(state, step, *received)
        done(step)
        if shape.is_evaluated(step):
            for channel, number in shape.each_of(held_out):
                state = chain(state, take(channel, step, number))
        return state

    return train


def generator(cluster: Cluster, links: Sequence[Any]) -> Callable[..., bytes]:
    """Makes tokens; see experiments/m3/generator.py."""
    shape, watch, [link] = cluster.shape, cluster.simulation, links
    tokens = link.sender("tokens", shape.spec, IDENTITY)
    held_out = link.sender("held_out", shape.spec, IDENTITY)

    def train(step: int, state: bytes, done: Callable[[int], None]) -> bytes:
        watch.compute(cluster)
        state = chain(state, step)
        put(tokens, step, payload(shape, state))
        if shape.is_evaluated(step):
            for channel, number in shape.each_of([held_out]):
                put(channel, step, payload(shape, state, number), number)
                watch.check_memory(link)
        return state

    return train


def target(cluster: Cluster, links: Sequence[Any]) -> Callable[..., bytes]:
    """Answers the source; see experiments/abnet/target.py."""
    hidden = links[0].receiver("hidden", cluster.shape.spec, IDENTITY)
    gradient = links[0].sender("gradient", cluster.shape.spec, IDENTITY)
    batch = range(cluster.shape.micro_batches)

    def train(step: int, state: bytes, done: Callable[[int], None]) -> bytes:
        received, _, _ = pipeline.back_step(
            Back(cluster), state, batch, None, step, hidden, gradient, None
        )
        done(step)
        return chain(state, step, *received)

    return train


def source(cluster: Cluster, links: Sequence[Any]) -> Callable[..., bytes]:
    """Sends to the target; see experiments/abnet/source.py."""
    hidden = links[0].sender("hidden", cluster.shape.spec, IDENTITY)
    gradient = links[0].receiver("gradient", cluster.shape.spec, IDENTITY)
    batch, ahead = range(cluster.shape.micro_batches), cluster.shape.ahead

    def train(step: int, state: bytes, done: Callable[[int], None]) -> bytes:
        ends = hidden, gradient
        received, _, _ = pipeline.front_step(
            Front(cluster), state, batch, None, step, *ends, None, ahead=ahead
        )
        return chain(state, step, *received)

    return train


OPENED = {
    "discriminator": discriminator,
    "generator": generator,
    "source": source,
    "target": target,
}


class Front:
    """A `cut.Front` whose gradient is what was received, in order."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def zero_grads(self, params):
        return ()

    def forward(self, params, batch, rng, states, step, received):
        self._cluster.simulation.compute(self._cluster)
        sent = payload(self._cluster.shape, params, step, batch)
        return selector.Selected(sent, 0), None, 0.0, states

    def backward(self, params, batch, rng, kept, selected, states, grads, step):
        return (*grads, selected.payload.tobytes()), states, None


class Back:
    """A `cut.Back` likewise; it answers with a hash of what it got."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def zero_grads(self, params):
        return ()

    def step(self, params, batch, rng, received, states, grads, step):
        self._cluster.simulation.compute(self._cluster)
        data = received.payload.tobytes()
        reply = selector.Selected(payload(self._cluster.shape, params, data), 0)
        return reply, (*grads, data), {}, states


def put(channel: Any, step: int, array: np.ndarray, number: int = 0) -> None:
    channel.send_payload(step, selector.Selected(array, 0), number)


def take(channel: Any, step: int, number: int = 0) -> bytes:
    """Receives an array's bytes."""
    return channel.recv_payload(step, number).payload.tobytes()
