"""`--wan=auto-scaled`: the paper's line, scaled to this machine's step time.

Table 5 was measured between two clusters of 8 V100. Its baseline sends 128 sentences x
64 tokens x 768 units as float32, 201.3 Mbit, each way a step: 3.355 s at 60 Mbit/s. A
step takes 4.42 s. If both directions overlapped wholly, 1.07 s of it are left for
everything else; a line fitted through the ten rows leaves 0 to 0.16 s, and the model's
8.7 TFLOP take about 0.11 s. So compute is a tenth of the wire's one way, 0.34 s, or
less. We take a tenth, which is the hardest case: the less the wire weighs, the less can
be hidden behind it and the less compression gains.

Here the machine computes many times slower, and the tensors are smaller. So a step's
compute is measured, both halves in one process without a codec, and the line is given
the rate at which padded float32 takes 10 times as long one way. The one-way delay of
15 ms is scaled like the compute.
"""

import dataclasses
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from experiments import configuration
from experiments.abnet import config, whole
from nebula_jax import errors, files
from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication import loopback
from nebula_jax.parallel import pipeline
from nebula_jax.runtime.life import process

AUTO = "auto-scaled"
WIRE_OVER_COMPUTE = 10.0
PAPER_BITS = 128 * 64 * 768 * 32  # section 4.2: batch, length, width, float32
PAPER_RATE = 60e6  # bits per second, section 4.3
PAPER_DELAY = 0.015  # seconds; our choice, as in flags/wan_60mbit.flags
PAPER_COMPUTE = PAPER_BITS / PAPER_RATE / WIRE_OVER_COMPUTE  # 0.336 s

MEASURED_STEPS = 5  # after one that compiles
FILE = "scaled_wan.json"
SETTINGS = "measured_for"
"""The name in that file of a digest of what the step depends on."""


@dataclasses.dataclass(frozen=True)
class ScaledWan:
    """A measurement, and the line that follows from it."""

    wan: str
    """For --wan."""
    factor: float
    """This machine's compute time over the paper's."""
    compute_seconds: float
    """A step's, both halves, no codec and no line."""
    padded_bits: int
    """A step's hidden states as padded float32, one way."""
    rate: float
    """Bits per second."""
    delay: float
    """Seconds, one way."""


def scale(compute_seconds: float, padded_bits: int) -> ScaledWan:
    """Returns the line on which padded float32 takes 10 times the compute, one way.

    >>> scale(0.5, 10_000_000).wan
    '2000kbit,22.35ms'

    Args:
      compute_seconds: of a step.
      padded_bits: of its hidden states.
    """
    rate = padded_bits / (WIRE_OVER_COMPUTE * compute_seconds)
    factor = compute_seconds / PAPER_COMPUTE
    delay = PAPER_DELAY * factor
    wan = f"{rate / 1e3:.0f}kbit,{1e3 * delay:.2f}ms"
    return ScaledWan(wan, factor, compute_seconds, padded_bits, rate, delay)


def check(local: config.Local) -> None:
    """Raises errors.SettingsError where a process could not measure both halves."""
    if local.wan != AUTO or local.cluster == "all":
        return
    if local.cluster == "whole":
        raise errors.SettingsError(f"--wan={AUTO}: --cluster=whole has no line")
    raise errors.SettingsError(
        f"--wan={AUTO} measures both halves of the step, so it goes with --cluster=all;"
        " give source and target the same line, such as the one that it printed"
    )


def without(local: config.Local) -> config.Local:
    """Returns the settings without a line if it is yet to be measured."""
    return dataclasses.replace(local, wan="") if local.wan == AUTO else local


def resolve(run: config.Run, folders: whole.Folders, models: Sequence[str]) -> str:
    """Returns --wan, or the line that auto-scaled stands for; reports that.

    It is kept in the run's folder, so that a run that resumes has the same line. One
    with other settings measures anew.

    Args:
      run: of this process.
      folders: text of source and target.
      models: digests of PLM-S and PLM-T.
    """
    if run.local.wan != AUTO:
        return run.local.wan
    path, settings = run.local.workdir / FILE, _settings(run, models)
    kept = json.loads(path.read_text()) if path.is_file() else {}
    if kept.get(SETTINGS) == settings:
        found = _line(kept)
    else:
        with process.timed("measuring a step's compute"):
            found = scale(*measure(run, folders))
        about = {**dataclasses.asdict(found), SETTINGS: settings}
        with files.writing(path) as partial:
            partial.write_text(json.dumps(about, indent=1, allow_nan=False) + "\n")
    process.message(
        f"a step computes for {found.compute_seconds:.3f} s,"
        f" {found.factor:.2f} times the paper's; so --wan={found.wan}, on which padded"
        f" float32 takes {found.padded_bits / found.rate:.2f} s one way"
    )
    return found.wan


def _settings(run: config.Run, models: Sequence[str]) -> str:
    """Returns a digest of what a step's time depends on."""
    settings = sorted(configuration.settings(run.agreed).items())
    return files.digest_of([str(settings), run.local.train_all, *models])[:16]


def read(local: config.Local) -> dict[str, Any]:
    """Returns what a run measured for its line, --wan; {} if that was given."""
    path = local.workdir / FILE
    if not path.is_file():
        return {}
    found = dataclasses.asdict(_line(json.loads(path.read_text())))
    return found if found["wan"] == local.wan else {}


def _line(kept: Mapping[str, Any]) -> ScaledWan:
    """Returns the line of the file's contents."""
    names = [field.name for field in dataclasses.fields(ScaledWan)]
    return ScaledWan(**{name: kept[name] for name in names})


def measure(run: config.Run, folders: whole.Folders) -> tuple[float, int]:
    """Measures a step of the largest bucket, both halves without codecs.

    Args:
      run: of this process.
      folders: text of source and target.

    Returns:
      The median seconds of a step, and the bits of its hidden states as padded float32.
    """
    both = whole.load(run.with_agreed(forward_codec="", backward_codec=""), folders)
    source, target = both.halves
    order = both.batches[0].order
    steps = range(1, order.steps_per_epoch + 1)
    step = max(steps, key=lambda step: order.batch(step - 1).bucket)
    states = source.fresh.init(), target.fresh.init()
    parts = list(both.at(step, states)[1])
    spec = source.program.spec(source.params(states[0]), parts[0][0], None)
    codecs = source.program.init_states(spec), target.program.init_states(spec)
    here, there = loopback.ends()
    plain = codec_lib.identity()
    hidden = here.sender("hidden", spec, plain), there.receiver("hidden", spec, plain)
    gradient = (
        there.sender("gradient", spec, plain),
        here.receiver("gradient", spec, plain),
    )
    seconds = []
    for _ in range(1 + MEASURED_STEPS):
        start = time.perf_counter()
        grads, codecs, _, metrics = pipeline.in_process_step(
            (source.program, target.program),
            (source.params(states[0]), target.params(states[1])),
            parts,
            (None, None),
            step,
            hidden,
            gradient,
            codecs,
        )
        states = (
            source.apply(states[0], grads[0], metrics)[0],
            target.apply(states[1], grads[1], metrics)[0],
        )
        jax.block_until_ready(states)
        seconds.append(time.perf_counter() - start)
    padded = 8 * len(parts) * codec_lib.nbytes(spec["hidden"])
    return statistics.median(seconds[1:]), padded
