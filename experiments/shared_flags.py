"""Flags that several experiments share, each defined once, and how flags become values.

An experiment's `config.py` has two frozen dataclasses whose fields are the flags of
their names: `Agreed`, the settings that all clusters of a run must share, and `Local`,
those that each cluster chooses for itself. `read` fills them in `main`; from there on
they are passed. `arguments` turns them back into flags, for a process of the run or for
its `run.flags`.
"""

import dataclasses
import gc
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from absl import app, flags, logging

from experiments import command_line
from nebula_jax import errors, files
from nebula_jax.models import transformer
from nebula_jax.runtime import connect, process, report

# What a process is, and where its files are.
flags.DEFINE_string(
    "cluster",
    "all",
    "Part of the run that this process is: all (starts every cluster here), whole (the"
    " same computation uncut), or the name of one cluster: see the experiment.",
)
flags.DEFINE_string(
    "workdir", "", "Folder of the run; runs/<name of the flagfile> if empty."
)
flags.DEFINE_string(
    "data_dir",
    "package:django",
    "Text folder (see experiments/m3/README.md), or package:django.",
)
flags.DEFINE_string(
    "prepared_dir", "prepared", "Folder where tokenized corpora are kept between runs."
)
flags.DEFINE_string(
    "pretrained_dir", "pretrained", "Folder of prepared models, a folder for each."
)
flags.DEFINE_string("run", "", "Folder of an earlier run, whose flags hold.")
flags.DEFINE_string("out", "", "File or folder to write.")

# How clusters meet.
flags.DEFINE_string(
    "listen",
    "127.0.0.1:0",
    "HOST:PORT where the listening cluster waits; [::]:PORT for IPv6 and IPv4.",
)
flags.DEFINE_string("peer", "", "HOST:PORT of the listening cluster.")
flags.DEFINE_string(
    "wan",
    "",
    "Emulated line, such as 60mbit,15ms: rate each way, one-way delay. Also jitter=2ms,"
    " cut=5s@20s, and up:...;down:... for lines that differ by direction. train_abnet"
    " also takes auto-scaled: slowed by as much as this machine computes slower than"
    " the paper's.",
)
flags.DEFINE_string(
    "tls",
    "auto",
    "Folder with ca.pem, cert.pem and key.pem for mutual TLS; auto makes them for the"
    " run with --cluster=all; off is plain TCP.",
)
flags.DEFINE_float(
    "connect_timeout", 60.0, "Seconds to wait for the other clusters to connect."
)
flags.DEFINE_float(
    "peer_timeout", 30.0, "Seconds of silence after which a connection counts as lost."
)
flags.DEFINE_float(
    "reconnect_timeout",
    60.0,
    "Seconds that a lost connection may take to come back; 0 ends the run at once.",
)
flags.DEFINE_float(
    "stuck_timeout",
    0.0,
    "Seconds after which a cluster that is waited for, lives and gets nothing done ends"
    " the run; ten times as long while it starts, saves or evaluates. 0 for 20 times"
    " the longest step of the run so far, at least 60.",
)

flags.DEFINE_integer(
    "restart",
    0,
    "Times that --cluster=all starts all clusters again because one died: was killed,"
    " or lost another for longer than --reconnect_timeout. They go on from the newest"
    " step that all have saved.",
    lower_bound=0,
)

# Devices.
flags.DEFINE_integer(
    "devices_per_cluster",
    0,
    "Devices of each cluster; 0 for all there are. On CPU that many are simulated.",
    lower_bound=0,
)
flags.DEFINE_integer(
    "model_parallel", 1, "Devices that share one copy of a model.", lower_bound=1
)

# Training.
flags.DEFINE_integer(
    "steps",
    1000,
    "Optimization steps.",
    lower_bound=1,
    upper_bound=2**31 - 1,  # optimizers count in int32
)
flags.DEFINE_integer(
    "batch_size", 16, "Examples of a step, in each cluster with text.", lower_bound=1
)
flags.DEFINE_integer(  # JAX and Grain take 32 bits
    "seed", 0, "Seed of everything random.", lower_bound=0, upper_bound=2**32 - 1
)
flags.DEFINE_float("learning_rate", 1e-4, "Peak learning rate.", lower_bound=0.0)
flags.DEFINE_integer(
    "warmup_steps", 10_000, "Steps until the peak learning rate.", lower_bound=0
)
flags.DEFINE_float(
    "weight_decay", 0.0, "Decoupled weight decay of AdamW.", lower_bound=0.0
)
flags.DEFINE_float(
    "clip_norm",
    1.0,
    "Largest global norm of a model's gradient; 0 for no clipping.",
    lower_bound=0.0,
)
flags.DEFINE_float(
    "dropout", 0.1, "Dropout rate in the encoders.", lower_bound=0.0, upper_bound=0.9
)
flags.DEFINE_enum(
    "dtype",
    "float32",
    list(transformer.DTYPES),
    "Type of the operands of matrix products; sums are float32.",
)
flags.DEFINE_list(
    "length_buckets",
    ["16", "32", "64"],
    "Ascending numbers of tokens in a row; a batch has examples of one bucket. The last"
    " one bounds the length of an example.",
)
flags.DEFINE_integer(
    "eval_every", 500, "Steps between evaluations on held-out text.", lower_bound=1
)
flags.DEFINE_integer(
    "checkpoint_every", 100, "Steps between checkpoints.", lower_bound=1
)
flags.DEFINE_integer("log_every", 10, "Steps between progress lines.", lower_bound=1)
flags.DEFINE_integer(
    "allow_nonfinite", 0, "Steps with NaN or Inf that may be skipped.", lower_bound=0
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreed:
    """The settings that all clusters of a run share and a checkpoint is checked for."""

    steps: int
    """Optimization steps."""
    batch_size: int
    """Examples of a step."""
    seed: int
    """Seed of everything random."""
    checkpoint_every: int
    """Steps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """The files and devices of a process of any run, and what it reports."""

    workdir: pathlib.Path
    """The run's folder."""
    data_dir: str
    """A text folder, or package:NAME."""
    prepared_dir: pathlib.Path
    pretrained_dir: pathlib.Path
    devices_per_cluster: int
    """0 for all there are."""
    model_parallel: int
    """Devices that share one copy of a model."""
    log_every: int
    """Steps."""
    allow_nonfinite: int
    """Steps that may be skipped because something of them is not finite."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Local(Place):
    """The settings that one cluster of a run chooses for itself."""

    cluster: str
    """`all`, `whole` or the cluster's name."""
    listen: str
    """HOST:PORT."""
    peer: str
    """HOST:PORT."""
    tls: str
    """A folder, `auto` or `off`."""
    wan: str
    """Such as 60mbit,15ms; empty for none."""
    connect_timeout: float
    """Seconds."""
    peer_timeout: float
    """Seconds."""
    reconnect_timeout: float
    """Seconds."""
    stuck_timeout: float
    """Seconds; 0 to derive them from the steps."""
    restart: int
    """Times, with --cluster=all."""

    def __post_init__(self) -> None:
        """Raises errors.SettingsError at what cannot work."""
        if self.restart and self.cluster != "all":
            raise errors.SettingsError(
                f"--restart={self.restart} is for --cluster=all; on real clusters each"
                " machine's own supervisor does it (see experiments/m3/README.md)"
            )

    def connection(self) -> connect.Settings:
        """Returns how this cluster reaches the others.

        Raises:
          errors.SettingsError: at a time or an address that cannot work.
        """
        fields = dataclasses.fields(connect.Settings)
        return connect.Settings(
            **{each.name: getattr(self, each.name) for each in fields}
        )

    def reaching(self, cluster: str, settings: connect.Settings) -> "Local":
        """Returns what the process of `cluster` is given in a run on this machine."""
        return dataclasses.replace(
            self, cluster=cluster, restart=0, **dataclasses.asdict(settings)
        )


AgreedT = TypeVar("AgreedT", bound=Agreed)
LocalT = TypeVar("LocalT", bound=Place)


@dataclasses.dataclass(frozen=True)
class Run(Generic[AgreedT, LocalT]):
    """The configuration of one process of a run, as an experiment passes it on."""

    agreed: AgreedT
    local: LocalT

    def with_agreed(self, **changes: Any) -> "Run[AgreedT, LocalT]":
        """Returns the run with some shared settings changed."""
        agreed = dataclasses.replace(self.agreed, **changes)
        return dataclasses.replace(self, agreed=agreed)

    def with_local(self, **changes: Any) -> "Run[AgreedT, LocalT]":
        """Returns the run with some settings of this process changed."""
        local = dataclasses.replace(self.local, **changes)
        return dataclasses.replace(self, local=local)


Values = TypeVar("Values")


def names(*classes: type) -> list[str]:
    """Returns the flags that configurations are made of."""
    return [each.name for cls in classes for each in dataclasses.fields(cls)]


def read(cls: type[Values]) -> Values:
    """Returns a configuration filled from the flags of its fields' names.

    Args:
      cls: a dataclass; its `tuple[int, ...]` fields are lists of numbers in a flag.

    Raises:
      errors.SettingsError: if a list has something else than numbers.
    """
    return cls(**{each.name: _value(each) for each in dataclasses.fields(cls)})


def _value(field: dataclasses.Field) -> Any:
    value = flags.FLAGS[field.name].value
    if field.name == "workdir":
        return command_line.workdir(value)
    if field.type is pathlib.Path:
        return pathlib.Path(value)
    if field.type == tuple[int, ...]:
        numbers = tuple(command_line.whole_number(part.strip()) for part in value)
        if None in numbers:
            raise errors.SettingsError(
                f"--{field.name}={','.join(value)}: expected numbers such as 16,32"
            )
        return numbers
    return tuple(value) if isinstance(value, list) else value


def arguments(run: Run) -> list[str]:
    """Returns the flags that make the same configuration again."""
    found = []
    for part in (run.agreed, run.local):
        for each in dataclasses.fields(part):
            value = getattr(part, each.name)
            if value is None:  # not given
                continue
            if isinstance(value, bool):
                found.append(f"--{'' if value else 'no'}{each.name}")
            elif isinstance(value, tuple):
                found.append(f"--{each.name}={','.join(map(str, value))}")
            else:
                found.append(f"--{each.name}={value}")
    return found


def settings(agreed: Any) -> dict[str, Any]:
    """Returns `--name` -> value, as a Hello compares and a checkpoint keeps them."""
    return {
        f"--{name}": ",".join(map(str, value)) if isinstance(value, tuple) else value
        for name, value in dataclasses.asdict(agreed).items()
    }


def write_run_flags(folder: pathlib.Path, run: Run) -> None:
    """Writes `run.flags`: a flagfile that alone repeats the run."""
    lines = [f"# {report.command()}", f"# commit {report.commit()}", *arguments(run)]
    with files.writing(folder / "run.flags") as partial:
        partial.write_text("\n".join(lines) + "\n")


def parse_run(folder: str, module: str) -> pathlib.Path:
    """Parses the flags of an earlier run, and those of this command over them.

    Args:
      folder: of the run, as given.
      module: of `experiments`, whose run it is to be.

    Returns:
      The folder.

    Raises:
      errors.SettingsError: if it is no such run.
    """
    if not folder:
        raise errors.SettingsError(f"--run is missing: the folder of a run of {module}")
    path = pathlib.Path(folder) / "run.flags"
    if not path.is_file():
        raise errors.SettingsError(f"--run={folder}: no run of {module} is there")
    command = [sys.argv[0], f"--flagfile={path}", *sys.argv[1:], f"--workdir={folder}"]
    try:
        command_line.parse(command)
    except flags.Error as error:
        reason = " ".join(str(error).split())
        raise errors.SettingsError(
            f"{path} is of no run of {module}: {reason}"
        ) from None
    return pathlib.Path(folder)


def run(main: Callable[[], int], defaults: Mapping[str, Any] | None = None) -> None:
    """Runs an entry point: parses its flags, prints errors as one line, exits.

    Args:
      main: does the work, returns the exit status.
      defaults: of shared flags, in this experiment.
    """
    # What is imported stays: neither a collection nor Python's end looks through it
    # again, which took a quarter of a short run's CPU time.
    gc.freeze()
    for name, value in (defaults or {}).items():
        flags.FLAGS.set_default(name, value)

    def parsed(argv: Sequence[str]) -> list[str]:
        try:
            rest = command_line.parse(argv)
            command_line.check_known()
            return rest
        except (flags.Error, UnicodeDecodeError) as error:
            process.message("error: " + " ".join(str(error).split()))
            sys.exit(2)

    def guarded(argv: Sequence[str]) -> int:
        logging.set_verbosity(logging.WARNING)  # the libraries' chatter
        if len(argv) > 1:
            process.message(
                f"error: {argv[1]!r} is no flag; every argument is a --flag"
            )
            return 2
        return process.guarded(main)

    app.run(guarded, flags_parser=parsed)
