"""`--wan=auto-dilated`: a line as slow beside this machine as the paper's beside its.

Table 5 was measured between two clusters of 8 V100. Its baseline sends 128 sentences x
64 tokens x 768 units as float32, 201.3 Mbit, each way a step: 3.355 s at 60 Mbit/s. A
step takes 4.42 s. If both directions overlapped wholly, 1.07 s of it are left for
everything else; a line fitted through the ten rows leaves 0 to 0.16 s, and the model's
8.7 TFLOP take about 0.11 s. So compute is a tenth of the wire's one way, 0.34 s, or
less. We take a tenth, which asks the most of us: the less the wire weighs, the less can
be hidden behind it and the less compression gains.

Here the machine computes many times slower, and the tensors are smaller. So a step's
compute is measured, both halves in one process without a codec, and the line is given
the rate at which padded float32 takes 10 times as long one way. The one-way delay of
15 ms is stretched like the compute.
"""

import dataclasses
import functools
import json
import pathlib
import statistics
import time
from typing import Any

import jax
from absl import flags

from experiments import lifecycle, shared_flags
from experiments.abnet import models as abnet_models
from experiments.abnet import whole
from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication import loopback
from nebula_jax.parallel import pipeline
from nebula_jax.training import abnet as abnet_training
from nebula_jax.training import cut

AUTO = "auto-dilated"
WIRE_OVER_COMPUTE = 10.0
PAPER_BITS = 128 * 64 * 768 * 32  # section 4.2: batch, length, width, float32
PAPER_RATE = 60e6  # bits per second, section 4.3
PAPER_DELAY = 0.015  # seconds; our choice, as in flags/wan_60mbit.flags
PAPER_COMPUTE = PAPER_BITS / PAPER_RATE / WIRE_OVER_COMPUTE  # 0.336 s

MEASURED_STEPS = 5  # after one that compiles
FILE = "dilation.json"


@dataclasses.dataclass(frozen=True)
class Dilation:
    """What was measured, and the line that follows from it."""

    wan: str
    """For --wan."""
    factor: float
    """This machine's compute time over the paper's."""
    compute_seconds: float
    """Of a step, both halves, no codec and no line."""
    padded_bits: int
    """Of a step's hidden states as padded float32, one way."""
    rate: float
    """Bits per second."""
    delay: float
    """Seconds, one way."""


def dilated(compute_seconds: float, padded_bits: int) -> Dilation:
    """The line on which padded float32 takes 10 times the compute, one way.

    >>> dilated(0.5, 10_000_000).wan
    '2000kbit,22.35ms'

    Args:
      compute_seconds: of a step.
      padded_bits: of its hidden states.
    """
    rate = padded_bits / (WIRE_OVER_COMPUTE * compute_seconds)
    factor = compute_seconds / PAPER_COMPUTE
    delay = PAPER_DELAY * factor
    wan = f"{rate / 1e3:.0f}kbit,{1e3 * delay:.2f}ms"
    return Dilation(wan, factor, compute_seconds, padded_bits, rate, delay)


def check() -> None:
    """Raises FlagError where nobody could measure both halves for both clusters."""
    cluster = shared_flags.CLUSTER.value
    if shared_flags.WAN.value != AUTO or cluster == "all":
        return
    if cluster == "whole":
        raise shared_flags.FlagError(f"--wan={AUTO}: --cluster=whole has no line")
    raise shared_flags.FlagError(
        f"--wan={AUTO} measures both halves of the step, so it goes with --cluster=all;"
        " give source and target the same line, such as the one that it said"
    )


def settle(folders: tuple[pathlib.Path, pathlib.Path]) -> None:
    """Puts a line in the place of --wan=auto-dilated, and says which.

    It is kept in the run's folder, so that a run that goes on has the same line.

    Args:
      folders: text of source and target.
    """
    if shared_flags.WAN.value != AUTO:
        return
    path = shared_flags.workdir() / FILE
    if path.is_file():
        found = Dilation(**json.loads(path.read_text()))
    else:
        with lifecycle.timed("measuring a step's compute"):
            found = dilated(*measure(folders))
        path.write_text(json.dumps(dataclasses.asdict(found), indent=1) + "\n")
    lifecycle.say(
        f"a step computes for {found.compute_seconds:.3f} s,"
        f" {found.factor:.2f} times the paper's; so --wan={found.wan}, on which padded"
        f" float32 takes {found.padded_bits / found.rate:.2f} s one way"
    )
    flags.FLAGS.wan = found.wan


def read(folder: pathlib.Path) -> dict[str, Any]:
    """What a run measured; {} if its line was given."""
    path = folder / FILE
    return json.loads(path.read_text()) if path.is_file() else {}


def measure(folders: tuple[pathlib.Path, pathlib.Path]) -> tuple[float, int]:
    """Median seconds of a step of the largest bucket, and its padded float32 bits."""
    plms = abnet_models.load_source(), abnet_models.load_target()
    source, target = whole.sides(folders, *plms)
    steps = range(1, source.order.steps_per_epoch + 1)
    step = max(steps, key=lambda step: source.order.batch(step - 1).bucket)
    batches = list(zip(source.batch(step)[1], target.batch(step)[1], strict=True))
    halves = _plain_halves(source, target)
    states = [source.placed.init(), target.placed.init()]
    spec = halves[0].spec(source.all_params(states[0]), batches[0][0], source.key)
    near, far = loopback.ends()
    plain = codec_lib.identity()
    codec_states = tuple(half.init_codecs(spec) for half in halves)
    ends = [
        (
            here.sender(name, spec, plain),
            there.receiver(name, spec, plain),
        )
        for name, here, there in (("hidden", near, far), ("gradient", far, near))
    ]
    seconds = []
    for _ in range(1 + MEASURED_STEPS):
        start = time.perf_counter()
        grads, codec_states, _, _ = pipeline.in_process_step(
            halves,
            (source.all_params(states[0]), target.all_params(states[1])),
            batches,
            (source.key, states[1].key()),
            step,
            *ends,
            codec_states,
            grads=tuple(cut.zero_grads(state.params) for state in states),
        )
        states = [
            side.apply(state, own)
            for side, state, own in zip((source, target), states, grads, strict=True)
        ]
        jax.block_until_ready(states)
        seconds.append(time.perf_counter() - start)
    padded = 8 * len(batches) * codec_lib.nbytes(spec["hidden"])
    return statistics.median(seconds[1:]), padded


def _plain_halves(source: Any, target: Any) -> tuple[cut.Front, cut.Back]:
    """The halves as the clusters have them, but without their codecs."""
    plain = codec_lib.identity()
    return (
        cut.front(
            functools.partial(abnet_training.front, source.task),
            plain,
            plain,
            is_trained=abnet_models.is_trained_source,
            has_loss=True,
        ),
        cut.back(
            functools.partial(abnet_training.back, target.task),
            plain,
            plain,
            is_trained=abnet_models.is_trained_target(),
        ),
    )
