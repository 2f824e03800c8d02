"""The configuration of a run: flags as values that are passed on, and as flags again.

An experiment's `config.py` has two frozen dataclasses, of whose fields its flags are
made (see `fields`): `Agreed`, the settings that all clusters of a run must share, and
`Local`, those that each cluster chooses for itself. `fields.read` fills them in `main`;
from there on they are passed. `arguments` turns them back into flags, for a process of
the run or for its `run.flags`.
"""

import dataclasses
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from absl import flags

import nebula_jax
from experiments import command_line, fields
from nebula_jax import errors, files
from nebula_jax.communication.wire import frames
from nebula_jax.models import transformer
from nebula_jax.runtime import connect
from nebula_jax.runtime import context as context_lib
from nebula_jax.runtime.ranks import cluster as cluster_lib
from nebula_jax.runtime.ranks import devices
from nebula_jax.runtime.records import report


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreed:
    """The settings that all clusters of a run share and a checkpoint is checked for."""

    steps: int = fields.to_begin_with(
        1000,
        "Optimization steps.",
        lower=1,
        upper=2**31 - 1,  # optimizers count in int32
    )
    batch_size: int = fields.to_begin_with(
        16, "Examples of a step, in each cluster with text.", lower=1
    )
    micro_batches: int = fields.of_training(
        1,
        "Parts of a batch, one after the other, whose gradients are added up: less"
        " memory, and with train_abnet they overlap on the line.",
        lower=1,
    )
    seed: int = fields.of_run(
        0,
        "Seed of everything random.",
        upper=2**32 - 1,  # JAX and Grain take 32 bits
    )
    dtype: str = fields.of_training(
        "float32",
        "Type of the operands of matrix products; sums are float32.",
        choices=list(transformer.DTYPES),
    )
    learning_rate: float = fields.to_begin_with(1e-4, "Peak learning rate.")
    eval_every: int = fields.of_run(
        500, "Steps between evaluations on held-out text.", lower=1
    )
    checkpoint_every: int = fields.of_run(100, "Steps between checkpoints.", lower=1)

    def is_evaluated(self, step: int) -> bool:
        """Returns True if held-out text is evaluated after `step`."""
        return step % self.eval_every == 0 or step == self.steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """The files and devices of a process of any run, and what it reports."""

    workdir: pathlib.Path = fields.to_begin_with(
        "", "Folder of the run; runs/<name of the flagfile> if empty."
    )
    data_dir: str = fields.to_begin_with(
        "package:django",
        "Text folder (see experiments/m3/README.md), or package:django.",
    )
    prepared_dir: pathlib.Path = fields.of_data(
        "prepared", "Folder where tokenized corpora are kept between runs."
    )
    pretrained_dir: pathlib.Path = fields.of_model(
        "pretrained", "Folder of prepared models, a folder for each."
    )
    devices_per_cluster: int = fields.of_run(
        0,
        "Devices of each cluster; 0 for all there are. On CPU that many are simulated.",
    )
    fsdp: int = fields.of_run(
        1,
        "Devices among which parameters and optimizer are split, each with its own rows"
        " of a batch: parameters are gathered where they are used.",
        lower=1,
    )
    model_parallel: int = fields.of_run(
        1,
        "Devices that share the work on the same rows: heads, inner units and the"
        " vocabulary are split among them.",
        lower=1,
    )
    remat: bool = fields.for_experts(
        False,
        "Compute the activations of a block again for its gradient: less memory on GPUs"
        " and TPUs, a third more time.",
    )
    log_every: int = fields.of_run(10, "Steps between progress lines.", lower=1)
    trace: bool = fields.of_run(
        False,
        "Record what every process does and when, and what is on the line: trace.json"
        " of the run's folder opens in ui.perfetto.dev, and the summary has the time of"
        " every part. Each step is waited for, which can cost a few percent.",
    )
    allow_nonfinite: int = fields.for_experts(
        0, "Steps with NaN or Inf that may be skipped."
    )
    coordinator: str = fields.for_experts(
        "",
        "HOST:PORT where the first process of a cluster of several processes waits for"
        " the others; auto for what Slurm, Open MPI or Kubernetes have set.",
    )
    num_processes: int = fields.for_experts(
        0, "Processes of this cluster, with --coordinator."
    )
    process_id: int = fields.for_experts(
        -1, "Number of this process in its cluster, from 0.", lower=-1
    )
    connect_timeout: float = fields.of_line(
        60.0, "Seconds to wait for the other clusters to connect."
    )
    peer_timeout: float = fields.of_line(
        30.0, "Seconds of silence after which a connection counts as lost."
    )

    def layout(self) -> devices.Layout:
        """Returns how the cluster uses its devices."""
        return devices.Layout(self.devices_per_cluster, self.fsdp, self.model_parallel)

    def processes(self) -> cluster_lib.Settings:
        """Returns which processes this cluster has."""
        return cluster_lib.Settings(**fields.common(self, cluster_lib.Settings))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Local(Place):
    """The settings that one cluster of a run chooses for itself."""

    cluster: str = fields.to_begin_with(
        "all",
        "Part of the run that this process is: all (starts every cluster here), whole"
        " (the same computation uncut), or the name of one cluster, as above.",
    )
    listen: str = fields.to_begin_with(
        "127.0.0.1:0",
        "HOST:PORT where a cluster waits for those that dial it; [::]:PORT for IPv6 and"
        " IPv4. With --cluster=all, that of the first one that listens: others get free"
        " ports of the same host.",
    )
    peer: str = fields.to_begin_with(
        "",
        "HOST:PORT of the listening cluster. A cluster that dials several has one for"
        " each, in their order: a.example:7070,b.example:7071.\n"
        "With --federation, the organization that the other clusters have to be of; any"
        " if empty.",
    )
    federation: str = fields.of_security(
        "",
        "Folder of this organization in a federation (see SECURITY.md), whose switches"
        " carry what crosses. Empty for direct connections of the clusters.",
    )
    account: str = fields.of_security(
        "", "Account of the federation that has logged in; the folder's owner if empty."
    )
    job: str = fields.of_security(
        "", "Name by which the clusters of a run find each other in a federation."
    )
    tls: str = fields.of_security(
        "auto",
        "Folder with ca.pem, cert.pem and key.pem for mutual TLS; auto makes them for"
        " the run with --cluster=all; off is plain TCP.",
    )
    wan: str = fields.to_begin_with(
        "",
        "Emulated line: rate each way, one-way delay; none if empty.\n"
        "60mbit,15ms; also jitter=2ms, cut=5s@20s, 10mbit@60s (the rate from 60 s on),"
        " and up:...;down:... for lines that differ by direction.",
    )
    reconnect_timeout: float = fields.of_line(
        60.0,
        "Seconds that a lost connection may take to come back; 0 ends the run at once.",
    )
    stuck_timeout: float = fields.of_line(
        0.0,
        "Seconds after which a cluster that is waited for, lives and gets nothing done"
        " ends the run; ten times as long while it starts, saves or evaluates. 0 for 20"
        " times the longest step of the run so far, at least 60.",
    )
    restart: int = fields.of_run(
        0,
        "Times that --cluster=all starts all clusters again because one died: was"
        " killed, or lost another for longer than --reconnect_timeout. They resume from"
        " the newest step that all have saved.",
    )
    processes_per_cluster: int = fields.for_experts(
        1, "Processes of each cluster that --cluster=all starts here.", lower=1
    )

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
        if self.restart and self.cluster != "all":
            raise errors.SettingsError(
                f"--restart={self.restart} is for --cluster=all; on real clusters each"
                " machine's own supervisor does it (see experiments/m3/README.md)"
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
        return connect.Settings(**fields.common(self, connect.Settings))

    def reaching(self, cluster: str, settings: connect.Settings) -> "Local":
        """Returns what the process of `cluster` is given in a run on this machine."""
        return dataclasses.replace(
            self,
            cluster=cluster,
            restart=0,
            processes_per_cluster=1,
            **dataclasses.asdict(settings),
        )


fields.define(Agreed, Local)

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
          emulated_seconds: of each `Context.emulate_compute`.
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

    def hello(self, settings: Mapping[str, Any], saved: Sequence[int]) -> frames.Hello:
        """Returns the Hello of this process.

        Args:
          settings: what must be equal in all clusters.
          saved: steps that the cluster could resume after.
        """
        version = nebula_jax.__version__
        return frames.Hello(self.local.cluster, version, dict(settings), tuple(saved))

    def with_agreed(self, **changes: Any) -> "Run[AgreedT, LocalT]":
        """Returns the run with some shared settings changed."""
        agreed = dataclasses.replace(self.agreed, **changes)
        return dataclasses.replace(self, agreed=agreed)

    def with_local(self, **changes: Any) -> "Run[AgreedT, LocalT]":
        """Returns the run with some settings of this process changed."""
        local = dataclasses.replace(self.local, **changes)
        return dataclasses.replace(self, local=local)


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
            f"{path} is of no run of {module} in nebula_jax {nebula_jax.__version__}:"
            f" {reason}"
        ) from None
    return pathlib.Path(folder)
