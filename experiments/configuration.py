"""The configuration of a run: flags as values that are passed on, and as flags again.

An experiment's `config.py` has two frozen dataclasses whose fields are the flags of
their names: `Agreed`, the settings that all clusters of a run must share, and `Local`,
those that each cluster chooses for itself. `read` fills them in `main`; from there on
they are passed. `arguments` turns them back into flags, for a process of the run or for
its `run.flags`.
"""

import dataclasses
import pathlib
import sys
from typing import Any, Generic, TypeVar

from absl import flags

from experiments import command_line
from experiments import shared_flags as _defined_there  # noqa: F401
from nebula_jax import errors, files
from nebula_jax.runtime import connect
from nebula_jax.runtime import context as context_lib
from nebula_jax.runtime.ranks import cluster as cluster_lib
from nebula_jax.runtime.ranks import devices
from nebula_jax.runtime.records import report
from nebula_jax.runtime.served import data_channels

ROOT = pathlib.Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreed:
    """The settings that all clusters of a run share and a checkpoint is checked for."""

    steps: int
    """Optimization steps."""
    batch_size: int
    """Examples of a step."""
    micro_batches: int
    """Parts of a batch, whose gradients are added up."""
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
    fsdp: int
    """Devices among which parameters are split while they are not used."""
    model_parallel: int
    """Devices that share the work on one copy of a model."""
    remat: bool
    """True to compute activations again for the gradient, instead of keeping them."""
    log_every: int
    """Steps."""
    trace: bool
    """True to record what the process does and when."""
    allow_nonfinite: int
    """Steps that may be skipped because something of them is not finite."""
    coordinator: str
    """HOST:PORT of this cluster's first process, `auto`, or empty for one process."""
    num_processes: int
    """Processes of this cluster."""
    process_id: int
    """From 0."""
    connect_timeout: float
    """Seconds."""
    peer_timeout: float
    """Seconds."""

    def layout(self) -> devices.Layout:
        """Returns how the cluster uses its devices."""
        return devices.Layout(self.devices_per_cluster, self.fsdp, self.model_parallel)

    def processes(self) -> cluster_lib.Settings:
        """Returns which processes this cluster has."""
        fields = dataclasses.fields(cluster_lib.Settings)
        return cluster_lib.Settings(
            **{each.name: getattr(self, each.name) for each in fields}
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Local(Place):
    """The settings that one cluster of a run chooses for itself."""

    cluster: str
    """`all`, `whole` or the cluster's name."""
    listen: str
    """HOST:PORT."""
    peer: str
    """HOST:PORT, or a lab in a federation."""
    federation: str
    """A folder, or empty."""
    account: str
    """In a federation; empty for the folder's owner."""
    job: str
    """In a federation."""
    data: str
    """handle:NAME in a federation; empty to read data_dir."""
    tls: str
    """A folder, `auto` or `off`."""
    wan: str
    """Such as 60mbit,15ms; empty for none."""
    reconnect_timeout: float
    """Seconds."""
    stuck_timeout: float
    """Seconds; 0 to derive them from the steps."""
    restart: int
    """Times, with --cluster=all."""
    processes_per_cluster: int
    """With --cluster=all."""

    def __post_init__(self) -> None:
        """Raises errors.SettingsError at what cannot work."""
        if self.processes_per_cluster > 1 and self.cluster != "all":
            raise errors.SettingsError(
                f"--processes_per_cluster={self.processes_per_cluster} is for"
                " --cluster=all; elsewhere each process of a cluster is started with"
                " --coordinator, --num_processes and --process_id"
            )
        if self.coordinator and self.cluster in ("all", "whole"):
            raise errors.SettingsError(
                f"--coordinator={self.coordinator} is for the processes of one cluster,"
                f" not for --cluster={self.cluster}"
            )
        if self.data:
            self._check_data()
        if self.restart and self.cluster != "all":
            raise errors.SettingsError(
                f"--restart={self.restart} is for --cluster=all; on real clusters each"
                " machine's own supervisor does it (see experiments/m3/README.md)"
            )

    def _check_data(self) -> None:
        """Raises errors.SettingsError unless text can be read from where it is served.

        The process with the link would have to share the rows with the others.
        """
        data_channels.parse(self.data)
        if not self.federation:
            raise errors.SettingsError(f"--data={self.data} needs --federation=FOLDER")
        if self.cluster == "whole":
            raise errors.SettingsError(
                f"--data={self.data} is for clusters, not for --cluster=whole"
            )
        if self.coordinator or self.processes_per_cluster > 1:
            raise errors.SettingsError(
                f"--data={self.data} is for clusters of one process each"
            )

    @property
    def traced(self) -> int:
        """The processes of each cluster that record a trace."""
        return self.processes_per_cluster if self.trace else 0

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
            self,
            cluster=cluster,
            restart=0,
            processes_per_cluster=1,
            **dataclasses.asdict(settings),
        )


AgreedT = TypeVar("AgreedT", bound=Agreed)
LocalT = TypeVar("LocalT", bound=Place)


@dataclasses.dataclass(frozen=True)
class Run(Generic[AgreedT, LocalT]):
    """The configuration of one process of a run, as an experiment passes it on."""

    agreed: AgreedT
    local: LocalT

    def context(
        self, window: int = 0, emulated_seconds: float = 0.0
    ) -> context_lib.Context:
        """Returns the context of a training loop of this run.

        Args:
          window: steps that one cluster may be ahead of another.
          emulated_seconds: by which each step is made longer.
        """
        return context_lib.Context(
            context_lib.Settings(
                workdir=self.local.workdir,
                cluster=self.local.cluster,
                steps=self.agreed.steps,
                checkpoint_every=self.agreed.checkpoint_every,
                window=window,
                log_every=self.local.log_every,
                allow_nonfinite=self.local.allow_nonfinite,
                trace=self.local.trace,
                emulated_seconds=emulated_seconds,
                connection=self.local.connection(),
            )
        )

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
      cls: a dataclass; its `tuple[int, ...]` fields are lists of numbers in a flag. A
        list may also have one number for an `int`.

    Raises:
      errors.SettingsError: if a list has something else than numbers, or not one.
    """
    return cls(**{each.name: _value(each) for each in dataclasses.fields(cls)})


def _value(field: dataclasses.Field) -> Any:
    value: Any = flags.FLAGS[field.name].value
    if field.name == "workdir":
        return command_line.workdir(value)
    if field.type is pathlib.Path:
        return pathlib.Path(value)
    if field.type == tuple[int, ...] or (field.type is int and isinstance(value, list)):
        numbers = tuple(command_line.whole_number(part.strip()) for part in value)
        is_one = field.type is int
        if None in numbers or (is_one and len(numbers) != 1):
            expected = "one number such as 2" if is_one else "numbers such as 16,32"
            raise errors.SettingsError(
                f"--{field.name}={','.join(value)}: expected {expected}"
            )
        return numbers[0] if is_one else numbers
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


def described(run: Run, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns what must be equal in all processes of a cluster.

    Args:
      run: of this process.
      settings: what must be equal in all clusters.
    """
    ours = (ROOT / name for name in ("experiments", "nebula_jax"))
    code = sorted(path for folder in ours for path in folder.rglob("*.py"))
    return {
        **settings,
        **{f"--{name}": value for name, value in vars(run.local.layout()).items()},
        "code": files.digest_of([files.digest(path) for path in code]),
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
