"""The settings that every process of a run has, whatever it trains, as flags."""

import dataclasses
import pathlib
from typing import Self

from nebula_jax import errors
from nebula_jax.commands import fields
from nebula_jax.runtime import connect
from nebula_jax.runtime.life import process
from nebula_jax.runtime.ranks import cluster as cluster_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreed:
    """The settings that the clusters of any run share."""

    steps: int = fields.to_begin_with(
        1000,
        "Optimization steps.",
        lower=1,
        upper=2**31 - 1,  # optimizers count in int32
    )
    seed: int = fields.of_run(
        0,
        "Seed of everything random.",
        upper=2**32 - 1,  # JAX and Grain take 32 bits
    )
    checkpoint_every: int = fields.of_run(100, "Steps between checkpoints.", lower=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clusters:
    """The clusters of a run, where they are not fixed."""

    clusters: tuple[str, ...] = fields.to_begin_with(
        (),
        "Clusters of a run: their number; with scripts/issue_certificates.py their"
        " names, such as discriminator,generator:0.",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """The folder and devices of a process, and what it reports."""

    workdir: pathlib.Path = fields.to_begin_with(
        "", "Folder of the run; runs/<name of the flagfile> if empty."
    )
    devices_per_cluster: int = fields.of_run(
        0,
        "Devices of each cluster; 0 for all there are. On CPU that many are simulated.",
    )
    log_every: int = fields.of_run(
        10, "Steps between records of metrics, and progress lines.", lower=1
    )
    log_format: str = fields.of_run(
        "text",
        "Form of the lines on standard output: for people, of which few are written"
        " into a pipe or a file, or a JSON object for each record.",
        choices=process.LOG_FORMATS,
    )
    tracker: tuple[str, ...] = fields.of_run(
        (),
        "Places that get the metrics, beside the run's folder: wandb, trackio, mlflow"
        " (each an extra of the package), or module:name of your own.",
    )
    metrics_port: str = fields.of_run(
        "",
        "Port, or HOST:PORT, where Prometheus reads the metrics: without a host on this"
        " machine alone, and at the next port that is free if it is in use.",
    )
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
        " the others; auto for what Slurm, Open MPI or Kubernetes have set. All have to"
        " share --workdir, or NEBULA_CLUSTER_KEY in the environment: a secret of at"
        " least 32 characters.",
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

    def processes(self) -> cluster_lib.Settings:
        """Returns which processes this cluster has."""
        return cluster_lib.Settings(**fields.common(self, cluster_lib.Settings))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reach(Place):
    """The cluster of a process, and its way to the others."""

    cluster: str = fields.to_begin_with(
        "all",
        "Part of the run that this process is: all (starts every cluster here), whole"
        " (the same computation uncut), or the name of one cluster, as above.",
    )
    listen: str = fields.to_begin_with(
        "127.0.0.1:0",
        "HOST:PORT where a cluster waits for those that dial it; [::]:PORT for IPv6 and"
        " IPv4. With --cluster=all, that of the first one that listens: others get free"
        " ports of the same host. With --federation it need not be given: the switch"
        " reaches each cluster where that one reaches the switch.",
    )
    peer: str = fields.to_begin_with(
        "",
        "HOST:PORT of the listening cluster. A cluster that dials several has one for"
        " each, in their order: a.example:7070,b.example:7071.\n"
        "With --federation, the organization that the other clusters have to be of: if"
        " there is but one other, or policy.json names them, it may be empty.",
    )
    federation: str = fields.of_security(
        "",
        "Folder of this organization in a federation (see SECURITY.md), whose switches"
        " carry what crosses. Empty for direct connections of the clusters.",
    )
    job: str = fields.of_security(
        "", "Name by which the clusters of a run find each other in a federation."
    )
    tls: str = fields.of_security(
        "auto",
        "Folder with this cluster's cluster.pem for mutual TLS; auto makes one for each"
        " with --cluster=all; off is plain TCP.",
    )
    wan: str = fields.to_begin_with(
        "",
        "Emulated line: rate each way, one-way delay; none if empty.\n"
        "60mbit,15ms; also cut=5s@20s, 10mbit@60s (the rate from 60 s on),"
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
        """Returns the way to others; SettingsError at an impossible time or address."""
        return connect.Settings(**fields.common(self, connect.Settings))

    def reaching(self, cluster: str, settings: connect.Settings) -> Self:
        """Returns what the process of `cluster` is given in a run on this machine."""
        return dataclasses.replace(
            self,
            cluster=cluster,
            restart=0,
            processes_per_cluster=1,
            **dataclasses.asdict(settings),
        )


fields.define(Agreed, Clusters, Reach)
