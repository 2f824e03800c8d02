"""The configuration of a plan: its flags, and the values that are passed on."""

import dataclasses
import math
from typing import Any

from absl import flags

from experiments.m3 import config as m3_config
from nebula_jax import errors
from nebula_jax.communication import wan
from nebula_jax.parallel import planner
from nebula_jax.runtime.ranks import devices

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
flags.DEFINE_bool(
    "shared_machine",
    False,
    "All clusters compute on this machine, as with --cluster=all; else each has its"
    " own devices.",
)
NAMES = ("cluster_devices", "device_tflops", "shared_machine")
NO_LINE = planner.Lines()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The configuration of a plan."""

    run: m3_config.Run
    devices: tuple[int, int]
    """Devices of a generator, and of the discriminator."""
    tflops: tuple[float, float] | None
    """TFLOP/s of a device of each side; None to measure."""
    is_shared: bool
    """True if all clusters compute on this machine."""
    wan: str
    """As given."""
    out: str
    """A file for the numbers, or empty."""

    @property
    def lines(self) -> planner.Lines:
        """The line between two clusters."""
        return lines(self.wan)


def check_rows(settings: Settings) -> None:
    """Raises errors.SettingsError if a micro-batch cannot be spread over devices."""
    agreed, local = settings.run.agreed, settings.run.local
    for number in settings.devices:
        layout = devices.Layout(number, local.fsdp, local.model_parallel)
        devices.check(layout, agreed.batch_size, agreed.micro_batches)


def lines(text: str) -> planner.Lines:
    """Returns the line that --wan describes, as it begins.

    Cuts and later rates are not planned for.

    Raises:
      errors.NebulaError: if it cannot be read.
    """
    ways = wan.from_string(text)
    return planner.Lines(*(planner.Line(each.rate / 8, each.delay) for each in ways))


def from_flags() -> Settings:
    """Returns the flags as values; for `main`.

    Raises:
      errors.SettingsError: at what cannot work.
    """
    given = {name: flags.FLAGS[name].value for name in (*NAMES, "wan", "out")}
    for name, value in m3_config.DEFAULTS.items():
        flags.FLAGS.set_default(name, value)
    tflops = given["device_tflops"]
    return Settings(
        run=m3_config.from_flags(),
        devices=_two("cluster_devices", given["cluster_devices"], int),
        tflops=_two("device_tflops", tflops, float) if tflops else None,
        is_shared=given["shared_machine"],
        wan=given["wan"],
        out=given["out"],
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


def flag_names() -> list[str]:
    """Returns every flag of the command."""
    return [*NAMES, *m3_config.FLAGS, "wan", "out"]
