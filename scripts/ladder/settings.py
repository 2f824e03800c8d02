"""The configuration of `bert_ladder`: its flags, and the values that are passed on."""

import dataclasses
from typing import Any

from absl import flags

from experiments.bert import config
from nebula_jax import errors
from nebula_jax.runtime.ranks import devices
from scripts.bench import config as bench_config

flags.adopt_module_key_flags(bench_config)
flags.DEFINE_list(
    "tables",
    ["ladder", "scaling", "cost"],
    "Tables to make, of ladder, scaling and cost.",
)
flags.DEFINE_integer(
    "curve_steps", 3, "Steps of each rung's loss curve, each on its own batch.", 2
)
flags.DEFINE_integer(
    "scaling_steps", 20, "Steps of each run of several processes.", lower_bound=6
)
flags.DEFINE_bool(
    "trial",
    False,
    "Makes all tables with a tiny model, small batches and few steps, to try the"
    " command out.",
)

TABLES = ("ladder", "scaling", "cost")
DEVICES = 2
"""Devices among which the last rungs split a batch; on CPUs they are simulated."""
PROCESSES = (1, 2, 4)
OF_RUN = (
    *("data_dir", "languages", "task_mix", "prepared_dir", "vocabulary", "vocab_size"),
    *("model_size", "layers", "max_length", "batch_size", "micro_batches", "seed"),
    *("optimizer", "learning_rate", "weight_decay", "emulate_compute"),
)
"""The flags of `pretrain_bert` that hold here too."""
DEFAULTS = config.DEFAULTS | {
    **{"clusters": ["1"], "sync": "allreduce", "vocab_size": 8000, "max_length": 128},
    # Our choice: a step takes two cores one to three seconds.
    **{"batch_size": 64, "micro_batches": 2, "dropout": 0.0},
    # Losses fall from the first step on.
    **{"learning_rate": 1e-3, "warmup_steps": 0},
    "emulate_compute": ["500"],
}
"""Shared flags that have another default in this command."""
TRIAL: dict[str, Any] = {
    **{"model_size": "nano", "max_length": 32, "batch_size": 8},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The configuration of the command."""

    run: config.Run
    """A run of `pretrain_bert` with one cluster."""
    tables: tuple[str, ...]
    """Names in TABLES."""
    rounds: int
    """In which every step is timed once."""
    curve_steps: int
    """K."""
    processes: tuple[int, ...]
    """Processes of the cluster, in each run; 1 first."""
    scaling_steps: int
    """Steps of each of these runs."""
    out: str
    """File of the record; empty for none."""

    @property
    def emulated(self) -> int:
        """The milliseconds that a process sleeps in each step of a run of several."""
        return sum(self.run.local.emulate_compute)


def from_flags() -> Settings:
    """Returns the flags as values; for `main`.

    Raises:
      errors.NebulaError: at what cannot work.
    """
    given: Any = flags.FLAGS
    found = Settings(
        run=config.from_flags(),
        tables=tuple(given["tables"].value),
        rounds=given["rounds"].value,
        curve_steps=given["curve_steps"].value,
        processes=PROCESSES,
        scaling_steps=given["scaling_steps"].value,
        out=given["out"].value,
    )
    if given["trial"].value:
        found = dataclasses.replace(
            found,
            run=found.run.with_agreed(**TRIAL).with_local(
                vocab_size=2000, emulate_compute=(100,)
            ),
            rounds=1,
            curve_steps=2,
            processes=PROCESSES[:2],
            scaling_steps=6,
        )
    check(found)
    return found


def check(given: Settings) -> None:
    """Raises errors.NebulaError at what cannot work, before anything is compiled."""
    unknown = [each for each in given.tables if each not in TABLES]
    if unknown or not given.tables:
        raise errors.SettingsError(
            f"--tables={','.join(given.tables)}: expected some of {','.join(TABLES)}"
        )
    config.check(given.run)
    layout = devices.Layout(devices_per_cluster=DEVICES)
    agreed = given.run.agreed
    devices.check(layout, agreed.batch_size, agreed.micro_batches)
