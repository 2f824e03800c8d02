"""A cost model of data parallelism: the seconds and bytes of a step, in closed form.

Every device has the whole model, and computes A micro-batches of each batch. Then all
gradients are added up over rings (`AllReduce`); or each of several clusters goes on by
itself, and every H steps they exchange how far they have come (`LocalSteps`).

    t      = A t_micro + max(0, t_ring - window) + t_update + t_round
    t_ring = 2 (N - 1) (bytes / N / rate + delay)

    sync = AllReduce((Ring(32, Line(1.25e9, 50e-6)),), values=110e6, micro_batches=8)
    step_of(Compute(0.1, 0.2, 0.01), sync).seconds

Not in the model: what varies from step to step, nodes that differ, traffic of others,
reading data, evaluations, checkpoints. So real runs are slower. `fit` finds t_micro and
t_round, the constant of a round, from two measured configurations, and `predict` has
others from them. Units: seconds, bytes.

N members of a ring, A micro-batches of a device's batch, R clusters, H inner steps, P
fragments, tau delay in steps (see `training.local_steps`).
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from nebula_jax.parallel.planner import Compute, Line

FORWARD = 1 / 3
"""Share of a micro-batch's time that its forward pass takes: a third of its FLOPs."""
HALVINGS = 200  # of an interval: below the spacing of floats long before


@dataclasses.dataclass(frozen=True)
class Ring:
    """The members of a ring all-reduce, each of which sends to the next."""

    members: int
    """N: devices of a node, nodes of a cluster, or clusters."""
    line: Line
    """One member's, in each direction."""

    def sent(self, count: float) -> float:
        """Returns the bytes that each member sends to add up `count` bytes."""
        return 2 * (self.members - 1) / self.members * count

    def seconds(self, count: float) -> float:
        """Returns the seconds in which `count` bytes of each member are added up."""
        hops = 2 * (self.members - 1)
        return self.line.seconds(self.sent(count)) + hops * self.line.delay_seconds


@dataclasses.dataclass(frozen=True)
class AllReduce:
    """A sum of all nodes' gradients, in every step."""

    rings: Sequence[Ring]
    """The innermost first: gradients are added up in all of them, one after another."""
    values: float
    """Gradients, as many as parameters that train."""
    micro_batches: int = 1
    """A."""
    bytes_per_value: float = 4.0
    """On the line: 4 for float32, 2 for 16 bits."""
    in_every_micro_batch: bool = False
    """True to add up after each micro-batch, not once after the last one."""
    overlap: float = 0.0
    """Share of the backward pass of a round's last micro-batch that runs meanwhile."""
    constant: float = 0.0
    """t_round, seconds of each round beside its bytes and delays."""

    def __post_init__(self) -> None:
        """Raises ValueError at what cannot be."""
        if self.micro_batches < 1:
            raise ValueError(f"micro_batches is {self.micro_batches}, below 1")
        if not 0 <= self.overlap <= 1:
            raise ValueError(f"overlap is {self.overlap}, not in [0, 1]")

    @property
    def rounds(self) -> int:
        """The rounds of a step; none if there is nobody else."""
        if all(ring.members == 1 for ring in self.rings):
            return 0
        return self.micro_batches if self.in_every_micro_batch else 1

    @property
    def seconds(self) -> float:
        """The seconds of a round on the lines (t_ring)."""
        count = self.values * self.bytes_per_value
        return sum(ring.seconds(count) for ring in self.rings)


@dataclasses.dataclass(frozen=True)
class LocalSteps:
    """An exchange of clusters that train by themselves between two rounds."""

    inner: AllReduce
    """Within a cluster; its batch is the cluster's."""
    clusters: int
    """R."""
    line: Line
    """One cluster's, in each direction; all its messages share it."""
    fragments: Sequence[float]
    """Values of each of the P fragments."""
    inner_steps: int
    """H."""
    delay: int = 0
    """tau, steps from a fragment's sending until it is applied."""
    bits_per_value: float = 32.0
    """The codec's."""
    has_hub: bool = False
    """True if one cluster passes on the messages of all others; else each sends to
    each."""
    constant: float = 0.0
    """Seconds of each round in which nothing computes: encoding, the outer step."""

    def __post_init__(self) -> None:
        """Raises ValueError at a delay that `training.local_steps` refuses."""
        between = self.inner_steps // len(self.fragments)
        if not 0 <= self.delay < between:
            raise ValueError(
                f"delay is {self.delay}, not below the {between} steps between two"
                " fragments"
            )

    @property
    def rounds(self) -> float:
        """The rounds of a step: P / H."""
        return len(self.fragments) / self.inner_steps if self.clusters > 1 else 0.0

    @property
    def messages(self) -> int:
        """The messages of a round that leave the cluster that sends most.

        Each of R clusters sends R - 1. A hub sends R - 1 others its own and R - 2 more.
        """
        others = self.clusters - 1
        return others * others if self.has_hub else others

    def message_bytes(self, fragment: float) -> float:
        """Returns the bytes of a message with so many values."""
        return fragment * self.bits_per_value / 8

    def seconds(self, fragment: float) -> float:
        """Returns the seconds until all clusters have every message of a round.

        Args:
          fragment: values.
        """
        if self.clusters == 1:
            return 0.0
        hops = 2 if self.has_hub and self.clusters > 2 else 1
        on_line = self.line.seconds(self.messages * self.message_bytes(fragment))
        return on_line + hops * self.line.delay_seconds


Sync = AllReduce | LocalSteps


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of a step in the long run."""

    seconds: float
    exposed: float
    """Seconds of a step in which nothing computes, because of a round."""
    sent: float
    """Bytes a step over the outermost line, of the member that sends most."""

    @property
    def exposed_share(self) -> float:
        """The share of the time in which nothing computes."""
        return self.exposed / self.seconds if self.seconds else 0.0


def compute_of(
    micro_batch: float, update: float = 0.0, forward: float = FORWARD
) -> Compute:
    """Returns the compute of a micro-batch of which the whole time is given.

    Args:
      micro_batch: seconds, forward and backward (t_micro).
      update: seconds of the optimizer, once a step.
      forward: share of a micro-batch that is its forward pass.
    """
    return Compute(forward * micro_batch, (1 - forward) * micro_batch, update)


def step_of(compute: Compute, sync: Sync) -> Cost:
    """Computes the cost of a step.

    Args:
      compute: of a micro-batch on a device; `update` once a step.
      sync: what follows, and when.
    """
    if isinstance(sync, LocalSteps):
        return _local_step(compute, sync)
    busy = sync.micro_batches * compute.micro_batch + compute.update
    window = sync.overlap * compute.backward
    exposed = sync.rounds * (max(0.0, sync.seconds - window) + sync.constant)
    count = sync.values * sync.bytes_per_value
    sent = sync.rounds * sync.rings[-1].sent(count) if sync.rings else 0.0
    return Cost(busy + exposed, exposed, sent)


def _local_step(compute: Compute, sync: LocalSteps) -> Cost:
    """Computes the cost of an inner step, with its share of P rounds in H steps.

    A fragment has `delay` steps to cross; what it takes longer, all wait for.
    """
    inner = step_of(compute, sync.inner)
    if sync.clusters == 1:
        return inner
    window = sync.delay * inner.seconds
    waited = sum(max(0.0, sync.seconds(each) - window) for each in sync.fragments)
    exposed = waited / sync.inner_steps + sync.rounds * sync.constant
    sent = sync.messages * sync.message_bytes(sum(sync.fragments)) / sync.inner_steps
    return Cost(inner.seconds + exposed, inner.exposed + exposed, sent)


def total(phases: Sequence[tuple[int, Cost]]) -> Cost:
    """Adds up the phases of a run.

    Args:
      phases: steps of each, and the cost of one.

    Returns:
      The cost of all steps.
    """
    return Cost(
        sum(steps * each.seconds for steps, each in phases),
        sum(steps * each.exposed for steps, each in phases),
        sum(steps * each.sent for steps, each in phases),
    )


class Measured(NamedTuple):
    """A configuration, and what a step of it took."""

    sync: Sync
    """Its constant is not used."""
    seconds: float
    """The step's time."""


class Fit(NamedTuple):
    """The times that two measurements determine."""

    compute: Compute
    """A micro-batch, and the update that was given."""
    constant: float
    """t_round, seconds; below 0 if rounds are faster than their lines allow."""


def fit(
    measured: Sequence[Measured], update: float = 0.0, forward: float = FORWARD
) -> Fit:
    """Determines the time of a micro-batch and the constant of a round.

    The constant is what rounds take beside bytes and delays, if all configurations have
    it alike; so measure two whose rounds, beside a micro-batch, are unequally many.

    Args:
      measured: two configurations of the same model and micro-batch.
      update, forward: of `compute_of`.

    Raises:
      ValueError: if it is not two, or if no time of a micro-batch explains them.
    """
    if len(measured) != 2:
        raise ValueError(
            f"a fit takes two measured configurations, not {len(measured)}"
        )
    one, two = (
        each._replace(sync=dataclasses.replace(each.sync, constant=0.0))
        for each in measured
    )

    def rest(each: Measured, micro_batch: float) -> float:
        compute = compute_of(micro_batch, update, forward)
        return each.seconds - step_of(compute, each.sync).seconds

    def gap(micro_batch: float) -> float:
        """Returns a difference that is 0 where both have the same constant."""
        first, second = rest(one, micro_batch), rest(two, micro_batch)
        return two.sync.rounds * first - one.sync.rounds * second

    low, high = 0.0, max(one.seconds, two.seconds)
    at_low, at_high = gap(low), gap(high)
    if at_low * at_high > 0 or at_low == at_high:
        raise ValueError(
            f"steps of {one.seconds:.4g} s and {two.seconds:.4g} s determine no time of"
            " a micro-batch: are their rounds unequally many, and not slower than the"
            " lines that were given?"
        )
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if gap(middle) * at_low > 0:
            low = middle
        else:
            high = middle
    most = max((one, two), key=lambda each: each.sync.rounds)
    return Fit(compute_of(high, update, forward), rest(most, high) / most.sync.rounds)


def predict(found: Fit, sync: Sync) -> Cost:
    """Predicts the cost of a step of another configuration.

    Args:
      found: from `fit`.
      sync: of the configuration; its constant is the fitted one's.
    """
    return step_of(found.compute, dataclasses.replace(sync, constant=found.constant))
