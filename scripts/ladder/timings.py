"""The ladder, measured: every rung's step in turn, round by round, on the same batches.

All begin from the same seed. So a rung has the losses of the one below it, and only the
time differs.

K batches, of B sequences with L tokens.
"""

import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.runtime.life import process
from scripts.bench import interleave, pytorch, shapes
from scripts.ladder import rungs, sequences
from scripts.ladder import settings as ladder_settings
from scripts.plans import count

WARM = 1  # steps in each turn before the one that is timed
TRIED = 3  # rounds in which it is decided which attention goes on
FASTER = 1.03  # times as fast as without, in each of them: less may be noise
PYTORCH = "PyTorch, float32, logits everywhere, padded rows"
PACKED = "packed text, one device"

Step = Callable[[np.ndarray], Mapping[str, jax.Array]]
"""Takes a step on [B, L] int32 from the state of the last; returns its metrics."""


class Curve(NamedTuple):
    """The losses of the first K steps, and the tokens of their batches."""

    losses: list[float]
    tokens: list[int]


def begun(compiled: rungs.Compiled) -> Step:
    """Begins to train, from the seed on."""
    copy, program = compiled.copy, compiled.program
    state = copy.fresh.init()["state"]

    def take(input_ids: np.ndarray) -> Mapping[str, jax.Array]:
        nonlocal state
        inputs = copy.batch(input_ids, 0, 0.0).inputs
        state, metrics = program(state, copy.frozen, *inputs)
        return metrics

    return take


def turns(batches: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    """Yields the batch of each step in turn: all steps of a round have the same."""
    for number in itertools.count():
        for _ in range(WARM + 1):
            yield batches[number % len(batches)]


def in_turn(step: Step, batches: Sequence[np.ndarray]) -> Callable[[], Any]:
    """Makes a step without arguments, which takes the batches in turn."""
    given = turns(batches)
    return lambda: step(next(given))


def rates(seconds: Sequence[float], tokens: Sequence[int]) -> list[float]:
    """Returns tokens/s, round by round.

    Args:
      seconds: of the rounds that count; the one before them had the first batch.
      tokens: of the K batches.
    """
    return [
        tokens[number % len(tokens)] / each for number, each in enumerate(seconds, 1)
    ]


def curve(step: Step, batches: Sequence[np.ndarray]) -> Curve:
    """Takes a step on each batch."""
    found = [jax.device_get(step(each)) for each in batches]
    return Curve(
        [float(each["loss"]) for each in found], [int(each["tokens"]) for each in found]
    )


def difference(losses: Sequence[float], others: Sequence[float]) -> float:
    """Returns the largest difference between two loss curves."""
    return max(abs(a - b) for a, b in zip(losses, others, strict=True))


def goes_on(
    plain: rungs.Compiled, fused: rungs.Compiled, batches: Sequence[np.ndarray]
) -> str:
    """Decides which attention goes on: the fused one if it is clearly faster here."""
    runs = {
        "einsum": in_turn(begun(plain), batches),
        "fused": in_turn(begun(fused), batches),
    }
    seconds = interleave.time_runs(runs, TRIED, warm=WARM)
    pairs = zip(seconds["einsum"], seconds["fused"], strict=True)
    return "fused" if all(a > FASTER * b for a, b in pairs) else "einsum"


class Ladder(NamedTuple):
    """The rungs, compiled, the lowest first."""

    steps: list[rungs.Compiled]
    attention: str
    """The one that went on after its own rung."""

    @property
    def base(self) -> rungs.Compiled:
        """The rung that the one after fused attention stands on."""
        tried = (rungs.PLAIN, rungs.FUSED)[self.attention == "fused"]
        return next(each for each in self.steps if each.rung == tried)

    def below(self, step: rungs.Compiled) -> rungs.Compiled | None:
        """Returns the rung that another stands on; None for the first."""
        number = self.steps.index(step)
        if number == 0:
            return None
        below = self.steps[number - 1]
        return self.base if below.rung == rungs.FUSED else below


def build(
    given: ladder_settings.Settings,
    vocabulary: vocabularies.Vocabulary,
    batches: Sequence[np.ndarray],
) -> Ladder:
    """Compiles every rung."""
    micro_batches = given.run.agreed.micro_batches
    devices = min(ladder_settings.DEVICES, jax.device_count())
    steps: list[rungs.Compiled] = []

    def climb(more: Sequence[rungs.Rung]) -> None:
        for rung in more:
            flags = {**(steps[-1].flags if steps else rungs.START), **rung.flags}
            share = sequences.joined_share(
                batches, rung.devices, flags["micro_batches"]
            )
            with process.timed(f"compiling: {rung.name}"):
                steps.append(rungs.compiled(given.run, vocabulary, rung, flags, share))

    climb(rungs.FIRST)
    plain, fused = steps[-2:]
    attention = goes_on(plain, fused, batches)
    climb(rungs.last(attention, micro_batches, devices))
    return Ladder(steps, attention)


def measure(
    given: ladder_settings.Settings,
    vocabulary: vocabularies.Vocabulary,
    text: sequences.Text,
) -> dict[str, Any]:
    """Measures the ladder.

    Args:
      given: the settings.
      vocabulary: of the run.
      text: K batches.

    Returns:
      The figures of every rung, of PyTorch's step if it is installed, and of packed
      text.
    """
    agreed = given.run.agreed
    ladder = build(given, vocabulary, text.cut)
    encoder = ladder.base.copy.config.encoder
    shape = shapes.Shape(
        "BERT",
        *(encoder.layers, encoder.width, encoder.heads, encoder.feed_forward),
        *(encoder.vocab_size, agreed.batch_size, agreed.max_length),
    )
    running = {each.rung.name: begun(each) for each in ladder.steps}
    curves = {name: curve(step, text.cut) for name, step in running.items()}
    runs = {name: in_turn(step, text.cut) for name, step in running.items()}
    tokens = {name: each.tokens for name, each in curves.items()}

    packed = begun(ladder.base)
    tokens[PACKED] = curve(packed, text.packed).tokens
    runs[PACKED] = in_turn(packed, text.packed)
    if pytorch.is_installed():
        tokens[PYTORCH] = [int(np.sum(each != sequences.PAD)) for each in text.cut]
        runs[PYTORCH] = pytorch.bert(shape, turns(text.cut))
    else:
        process.message("PyTorch is not installed (requirements-parity.txt): left out")
    process.message(f"{len(runs)} steps in turn, {given.rounds} rounds")
    seconds = interleave.time_runs(runs, given.rounds, warm=WARM)
    return {
        "model": {
            "size": agreed.model_size,
            "layers": encoder.layers,
            "width": encoder.width,
            "vocab_size": encoder.vocab_size,
            "parameters": count.parameters(
                ladder.base.copy.fresh.shapes["state"].params
            ),
        },
        "text": given.run.local.data_dir,
        "batch": [agreed.batch_size, agreed.max_length],
        "platform": jax.default_backend(),
        "rounds": given.rounds,
        "start": dict(rungs.START),
        "attention": ladder.attention,
        "packed_padding": sequences.padding(text.packed),
        **figures(ladder, curves, seconds, tokens),
    }


def figures(
    ladder: Ladder,
    curves: Mapping[str, Curve],
    seconds: Mapping[str, Sequence[float]],
    tokens: Mapping[str, Sequence[int]],
) -> dict[str, list[dict[str, Any]]]:
    """Returns the figures of each step.

    Args:
      ladder: the rungs.
      curves: of each rung.
      seconds: of each step, round by round.
      tokens: of each step's K batches.

    Returns:
      `rungs`, and `beside` for the steps that are none.
    """
    rate = {name: rates(each, tokens[name]) for name, each in seconds.items()}

    def over(name: str, other: str) -> float | None:
        return interleave.ratio(rate[name], rate[other]) if other in rate else None

    def timed(name: str) -> dict[str, Any]:
        return {
            "name": name,
            "ms": 1e3 * statistics.median(seconds[name]),
            "tokens_per_second": statistics.median(rate[name]),
            "least": min(rate[name]),
            "most": max(rate[name]),
            "over_first": over(name, ladder.steps[0].rung.name),
            "over_pytorch": over(name, PYTORCH),
        }

    def of_rung(step: rungs.Compiled) -> dict[str, Any]:
        name, below = step.rung.name, ladder.below(step)
        losses = curves[name].losses
        found = timed(name) | {
            "devices": step.rung.devices,
            "padding": 1 - statistics.fmean(tokens[name]) / step.positions,
            "losses": losses,
            **{f"all_reduce_{kind}": n for kind, n in step.sums._asdict().items()},
        }
        if below is None:
            return found | {"flags": {}, "over_below": None, "difference": None}
        return found | {
            "flags": step.more_than(below),
            "over_below": over(name, below.rung.name),
            "difference": difference(losses, curves[below.rung.name].losses),
        }

    names = [each.rung.name for each in ladder.steps]
    return {
        "rungs": [of_rung(each) for each in ladder.steps],
        "beside": [timed(name) for name in rate if name not in names],
    }
