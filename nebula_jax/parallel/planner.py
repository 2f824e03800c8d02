"""A planner: the time of a step of M3's clusters, before any is started.

Section 3.3, Fig. 6 and 7. Where nothing varies from step to step, a step takes in the
long run as long as the slowest cycle of what waits for what:

    max(generator, line up, discriminator, line down, turn / (window + 1))

Each part is busy for its own seconds. A turn is one step from its generators to the
token that lets them go on: with window w, w + 1 of them are in flight.

    run = M3(Compute(0.6), Compute(1.5), Lines(LINE, LINE), 5_000_000, window=2)
    seconds(run)

Not in the model: what varies from step to step (a text's lengths, lost packets), TCP's
own dynamics, optimizers, evaluations and checkpoints. Units: seconds, bytes.
"""

import dataclasses

from nebula_jax.communication.wire import frames

TOKEN_BYTES = frames.frame_bytes(frames.StepDone)


@dataclasses.dataclass(frozen=True)
class Compute:
    """The time that a part of the model takes on its cluster's devices."""

    seconds: float
    """Of a micro-batch, forward and backward."""
    cores: float = 1.0
    """Cores that it keeps busy, where clusters share a machine's."""


@dataclasses.dataclass(frozen=True)
class Line:
    """One direction of a line: bytes leave one after the other, and arrive later."""

    bytes_per_second: float = 0.0
    """0 for unlimited."""
    delay_seconds: float = 0.0
    """One way."""

    def seconds(self, count: float) -> float:
        """Returns how long the line is busy with so many bytes."""
        return count / self.bytes_per_second if self.bytes_per_second else 0.0


@dataclasses.dataclass(frozen=True)
class Lines:
    """A line in both directions."""

    up: Line = Line()
    """To the cluster that leads, the discriminator."""
    down: Line = Line()
    """Back."""


@dataclasses.dataclass(frozen=True)
class M3:
    """A run of Scenario I: K generators alike, each on its line, and a discriminator.

    A generator's step is `fan_out` micro-batches, each of which leaves once it is made;
    the discriminator's is all of them, and a step token.
    """

    generator: Compute
    """One micro-batch of one generator."""
    discriminator: Compute
    """One micro-batch of each generator; a step has `fan_out` times as many."""
    lines: Lines
    """Those of each generator."""
    message_bytes: float
    """A micro-batch on the line."""
    generators: int = 1
    """K."""
    window: int = 2
    """Steps that a generator may be ahead."""
    fan_out: int = 1
    """n, micro-batches of a generator's step."""


def busy(run: M3) -> dict[str, float]:
    """Returns the seconds of a step that each part has something to do."""
    return {
        "generators": run.fan_out * run.generator.seconds,
        "discriminator": run.fan_out * run.discriminator.seconds,
        "line up": run.fan_out * run.lines.up.seconds(run.message_bytes),
        "line down": run.lines.down.seconds(TOKEN_BYTES),
    }


def seconds(run: M3, cores: float | None = None) -> float:
    """Computes the time of a step in the long run.

    Args:
      run: the clusters, their line, and how they keep pace.
      cores: of one machine that all clusters share; None if each has its own. The time
        is then the least: clusters that compute at once may keep each other waiting.
    """
    wanted = run.generators * run.generator.cores, run.discriminator.cores
    # Parts that want more cores than there are take longer, even by themselves.
    slower = [max(1.0, each / cores) if cores else 1.0 for each in wanted]
    made = slower[0] * run.generator.seconds
    judged = slower[1] * run.discriminator.seconds
    sent = run.lines.up.seconds(run.message_bytes)
    # A micro-batch is made while the one before it is on the line.
    turn = (
        made + (run.fan_out - 1) * max(made, sent) + sent + run.lines.up.delay_seconds
    )
    turn += run.fan_out * judged
    turn += run.lines.down.seconds(TOKEN_BYTES) + run.lines.down.delay_seconds
    found = max(*busy(run).values(), turn / (run.window + 1))
    if cores is None:
        return found
    work = wanted[0] * run.generator.seconds + wanted[1] * run.discriminator.seconds
    return max(found, run.fan_out * work / cores)


def savings(run: M3, cores: float | None = None) -> dict[str, float]:
    """Computes what a step would gain if one thing were twice as fast.

    Returns:
      Name -> the share of a step's time saved, the largest first: that is the
      bottleneck. The parts of `busy`, and `round trips`, the delay of both directions.
    """

    def faster(part: Compute) -> Compute:
        return dataclasses.replace(part, seconds=part.seconds / 2)

    def with_lines(up: int = 1, down: int = 1, delay: float = 1.0) -> M3:
        ways = (run.lines.up, up), (run.lines.down, down)
        lines = Lines(
            *(
                Line(factor * way.bytes_per_second, delay * way.delay_seconds)
                for way, factor in ways
            )
        )
        return dataclasses.replace(run, lines=lines)

    changed = {
        "generators": dataclasses.replace(run, generator=faster(run.generator)),
        "discriminator": dataclasses.replace(
            run, discriminator=faster(run.discriminator)
        ),
        "line up": with_lines(up=2),
        "line down": with_lines(down=2),
        "round trips": with_lines(delay=0.5),
    }
    now = seconds(run, cores)
    found = {
        name: 1 - seconds(each, cores) / now if now else 0.0
        for name, each in changed.items()
    }
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def fan_out(run: M3, replicas: int) -> tuple[int, float]:
    """Returns n of section 3.3, and t_d / t_g.

    Args:
      run: its pace.
      replicas: of the discriminator, of which each trains on one micro-batch in t_d.
    """
    ratio = run.discriminator.seconds * replicas / run.generator.seconds
    return max(1, min(replicas, round(ratio))), ratio
