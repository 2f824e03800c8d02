"""Plans a run of M3 before a cluster is started: time and bottleneck.

    python -m scripts.plan --flagfile=experiments/flags/m3_paper.flags \\
        --cluster_devices=8,64 --device_tflops=50,50 --wan=170mbit,15ms
    python -m scripts.plan --flagfile=experiments/flags/m3_quickstart.flags \\
        --wan=60mbit,15ms

Nothing is started, and no weights are made: both models are traced, the codecs give the
bytes on the line, and `parallel/planner.py` the time. Devices are as fast as
--device_tflops, or as this machine. A pretrained start is fetched for its shape, as the
run would. Settings that the run would refuse are refused, and so are --pipeline and
--emulate_compute, of which a plan has nothing. ABNet is not planned, as a plan knows
neither what a micro-batch costs nor the lengths of the text: a short run with --trace
says where the time goes.
"""

import dataclasses
import math
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from experiments import shared_flags
from experiments.m3 import config as m3_config
from nebula_jax import errors
from nebula_jax.communication import wan
from nebula_jax.parallel import planner
from nebula_jax.runtime.life import process
from nebula_jax.runtime.ranks import devices
from nebula_jax.runtime.records import report
from scripts.plans import traced

flags.DEFINE_list(
    "cluster_devices",
    ["1", "1"],
    "Devices of each cluster: those of each generator and of the discriminator.",
)
flags.DEFINE_list(
    "device_tflops",
    [],
    "Sustained TFLOP/s of one device: one number, or one for each side as in"
    " --cluster_devices. If empty, measured on this machine, for a few seconds.",
)
BALANCED = 0.05  # what twice the speed of one part saves, if others are as busy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The configuration of a plan."""

    run: m3_config.Run
    devices: tuple[int, int]  # of a generator, and of the discriminator
    tflops: tuple[float, float] | None  # of a device of each side; None to measure


def from_flags() -> Settings:
    """Returns the flags as values, for `main`; SettingsError at what cannot work."""
    for name, value in m3_config.DEFAULTS.items():
        flags.FLAGS.set_default(name, value)
    tflops = flags.FLAGS["device_tflops"].value
    return Settings(
        run=m3_config.from_flags(),
        devices=_two("cluster_devices", flags.FLAGS["cluster_devices"].value, int),
        tflops=_two("device_tflops", tflops, float) if tflops else None,
    )


def _two(flag: str, parts: list[str], read: type) -> tuple[Any, Any]:
    """Returns the two numbers of a flag; one counts for both sides."""
    try:
        numbers = [read(part) for part in parts]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or not all(0 < each < math.inf for each in numbers):
        raise errors.SettingsError(
            f"--{flag}={','.join(parts)}: expected two numbers above 0, such as 8,64"
        )
    return numbers[0], numbers[-1]


def check(given: Settings) -> None:
    """Raises errors.NebulaError at what a run, or a plan of it, cannot have."""
    agreed, local = given.run.agreed, given.run.local
    if agreed.generators.startswith("-") or not traced.generators(given.run):
        raise errors.SettingsError(
            f"--generators={agreed.generators}: expected a number from 1, or their"
            ' languages, as in "en de|hi ur"'
        )
    if local.pipeline:
        raise errors.SettingsError(
            f"--pipeline={local.pipeline}: a plan has no pipeline, in which devices"
            " wait for each other"
        )
    if local.emulate_compute:
        sleeps = ",".join(map(str, local.emulate_compute))
        raise errors.SettingsError(
            f"--emulate_compute={sleeps}: a plan is of the run's own models, without"
            " sleeps"
        )
    # What is given to one cluster does not matter.
    m3_config.check(
        given.run.with_local(
            cluster="all", coordinator="", devices_per_cluster=0, data=""
        )
    )
    wan.from_string(local.wan)  # an error at what cannot be read
    for number in given.devices:
        layout = devices.Layout(number, local.fsdp, local.model_parallel)
        devices.check(layout, agreed.batch_size, agreed.micro_batches)


def plan(given: Settings) -> dict[str, Any]:
    """Returns the numbers of a plan; NebulaError at settings that cannot work."""
    check(given)
    agreed, local = given.run.agreed, given.run.local
    parts = traced.parts(given.run)
    flops = [part.flops(part.rows) for part in parts]
    if given.tflops:
        speeds = [1e12 * each for each in given.tflops]
    else:
        with process.timed("measuring this machine's speed"):
            speeds = [traced.measure(part) for part in parts]
    run = _pace(given, flops, speeds)
    seconds = planner.seconds(run)
    sides = zip(parts, flops, speeds, given.devices, strict=True)
    return {
        "wan": local.wan,
        "is_measured": not given.tflops,
        "parts": [
            {
                "name": part.name,
                "devices": number,
                "tflops": speed / 1e12,
                "trained": traced.count(part.params),
                "flop": agreed.fan_out * count,
                "state_bytes": traced.bytes_on_device(
                    part.kept, number, local.fsdp, local.model_parallel
                ),
            }
            for part, count, speed, number in sides
        ],
        "busy": planner.busy(run),
        "bytes": {
            "line up": agreed.fan_out * run.message_bytes,
            "line down": planner.TOKEN_BYTES,
        },
        "seconds": seconds,
        "tokens": traced.generators(given.run)
        * agreed.fan_out
        * agreed.batch_size
        * agreed.max_length,
        "steps": agreed.steps,
        "savings": planner.savings(run),
        "fan_out": planner.fan_out(run, given.devices[1] // local.model_parallel),
    }


def _pace(
    given: Settings, flops: Sequence[float], speeds: Sequence[float]
) -> planner.M3:
    generator, discriminator = (
        # A cluster's devices share its work evenly.
        count / (speed * number)
        for count, speed, number in zip(flops, speeds, given.devices, strict=True)
    )
    return planner.M3(
        generator,
        discriminator,
        wan.from_string(given.run.local.wan),
        traced.message_bytes(given.run),
        window=given.run.agreed.window,
        fan_out=given.run.agreed.fan_out,
    )


def markdown(result: Mapping[str, Any]) -> str:
    """Renders a plan."""
    seconds, busy = result["seconds"], result["busy"]
    parts = [
        [
            each["name"],
            str(each["devices"]),
            f"{each['tflops']:.3g}",
            f"{each['trained'] / 1e6:.3g}",
            f"{each['flop'] / 1e12:.3g}",
            f"{busy[each['name']]:.3g}",
            f"{each['state_bytes'] / 1e9:.3g}",
        ]
        for each in result["parts"]
    ]
    header = ["cluster (each)", "devices", "TFLOP/s of a device", "trained, millions"]
    header += ["TFLOP a step", "s a step", "state on a device, GB"]
    ways = [
        [
            name,
            f"{count / 1e6:.3g}",
            f"{busy[name]:.3g}",
            f"{count / 1e6 / seconds:.3g}",
        ]
        for name, count in result["bytes"].items()
    ]
    hours = result["steps"] * seconds / 3600
    wanted, ratio = result["fan_out"]
    name, share = next(iter(result["savings"].items()))
    bottleneck = f"with the {name} twice as fast, a step would take {share:.0%} less"
    idle = (f"{part} {1 - each / seconds:.0%}" for part, each in busy.items())
    speed = "measured here (--device_tflops gives that of others)"
    return report.join(
        f"Line: {result['wan'] or 'no limit'}. Speed of devices:"
        f" {speed if result['is_measured'] else 'as given'}.",
        report.table(header, parts),
        report.table(["line", "MB a step", "s at its rate", "MB/s"], ways),
        f"A step takes {seconds:.3g} s: {1 / seconds:.3g} steps/s,"
        f" {result['tokens'] / seconds:,.0f} tokens/s. {result['steps']:,} steps take"
        f" {hours:.3g} h.",
        f"No part alone is the bottleneck: {bottleneck}, because others are as busy."
        if share < BALANCED
        else f"The bottleneck: {name}; {bottleneck}.",
        f"Idle in a step: {'; '.join(idle)}.",
        "While a replica of the discriminator trains on a micro-batch of each"
        f" generator, a generator makes {ratio:.3g} (t_d / t_g, section 3.3:"
        f" --fan_out={wanted}).",
        "For other settings, make a plan with them, and try them in a short run.",
        "Assumed: each cluster has its own devices, which share its work evenly; bytes"
        " are those of frames, without TCP's and TLS's own; sequences are packed full;"
        " optimizers, activations, evaluations and checkpoints are left out.",
    )


def main() -> int:
    """Plans, prints, and writes --out."""
    begin = time.monotonic()
    result = plan(from_flags())
    report.show(markdown(result))
    if out := flags.FLAGS["out"].value:
        record = report.provenance(time.monotonic() - begin) | result
        report.write(pathlib.Path(out), record)
    return 0


if __name__ == "__main__":
    shared_flags.run(main, names=["out", *m3_config.FLAGS])
