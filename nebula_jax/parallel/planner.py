"""A planner: the time of a step of M3's clusters, before any is started.

Section 3.3, Fig. 6 and 7. Where nothing varies from step to step, a step takes in the
long run as long as the slowest cycle of what waits for what:

    max(generator, line up, discriminator, line down, turn / (window + 1))

A turn is one step from its generators to the token that lets them go on: with window w,
w + 1 of them are in flight. Not in the model: what varies from step to step (a text's
lengths, lost packets), TCP's own dynamics, clusters that share a machine's cores,
optimizers, evaluations and checkpoints. Units: seconds, bytes.
"""

import dataclasses

from nebula_jax.communication import wan
from nebula_jax.communication.wire import frames

TOKEN_BYTES = frames.frame_bytes(frames.StepDone)


@dataclasses.dataclass(frozen=True)
class M3:
    """A run of Scenario I: K generators alike, each on its line, and a discriminator.

    A generator's step is `fan_out` micro-batches, each of which leaves once it is made;
    the discriminator's is all of them, and a step token.
    """

    generator: float  # seconds of a generator's micro-batch, forward and backward
    discriminator: float  # the same for one micro-batch of each generator
    lines: wan.Lines  # of each generator, as they begin, without cuts and changes
    message_bytes: float  # a micro-batch on the line
    window: int = 2  # steps that a generator may be ahead
    fan_out: int = 1  # n, micro-batches of a generator's step


def on_line(line: wan.Line, count: float) -> float:
    """Returns how many seconds a line is busy with so many bytes."""
    return 8 * count / line.rate if line.rate else 0.0


def busy(run: M3) -> dict[str, float]:
    """Returns the seconds of a step that each part has something to do."""
    return {
        "generators": run.fan_out * run.generator,
        "discriminator": run.fan_out * run.discriminator,
        "line up": run.fan_out * on_line(run.lines.up, run.message_bytes),
        "line down": on_line(run.lines.down, TOKEN_BYTES),
    }


def seconds(run: M3) -> float:
    """Computes the time of a step in the long run."""
    sent = on_line(run.lines.up, run.message_bytes)
    # A micro-batch is made while the one before it is on the line.
    turn = run.generator + (run.fan_out - 1) * max(run.generator, sent) + sent
    turn += run.lines.up.delay + run.fan_out * run.discriminator
    turn += on_line(run.lines.down, TOKEN_BYTES) + run.lines.down.delay
    return max(*busy(run).values(), turn / (run.window + 1))


def savings(run: M3) -> dict[str, float]:
    """Computes what a step would gain if one thing were twice as fast.

    Returns name -> the share of a step's time saved, the largest first: that is the
    bottleneck. The parts of `busy`, and `round trips`, the delay of both directions.
    """

    def with_lines(up: int = 1, down: int = 1, delay: float = 1.0) -> M3:
        ways = (run.lines.up, up), (run.lines.down, down)
        lines = [wan.Line(factor * way.rate, delay * way.delay) for way, factor in ways]
        return dataclasses.replace(run, lines=wan.Lines(*lines))

    changed = {
        "generators": dataclasses.replace(run, generator=run.generator / 2),
        "discriminator": dataclasses.replace(run, discriminator=run.discriminator / 2),
        "line up": with_lines(up=2),
        "line down": with_lines(down=2),
        "round trips": with_lines(delay=0.5),
    }
    now = seconds(run)
    found = {name: 1 - seconds(each) / now for name, each in changed.items()}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def fan_out(run: M3, replicas: int) -> tuple[int, float]:
    """Returns n of section 3.3, and t_d / t_g; a replica has a micro-batch in t_d."""
    ratio = run.discriminator * replicas / run.generator
    return max(1, min(replicas, round(ratio))), ratio
