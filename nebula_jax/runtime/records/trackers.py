"""Trackers: who takes a cluster's metrics beside its own files, as they come.

Weights & Biases, Trackio and MLflow, each an extra of the package; Prometheus, which
reads them; and anybody's `module:name`, called with `About`, that returns a
`metrics.Tracker`. A run needs none of them: one that fails is left out, with a message.
"""

import contextlib
import errno
import fcntl
import hashlib
import importlib
import os
import pathlib
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from nebula_jax import errors, files, installed, printable
from nebula_jax.communication import endpoints
from nebula_jax.runtime.life import process
from nebula_jax.training import metrics

PROJECT = "nebula"
PRIVATE = (
    *("account", "coordinator", "federation", "id_key", "job", "listen", "peer", "tls"),
)
"""Flags that a tracker is not told: where clusters are, and who takes part."""
HERE = "127.0.0.1"
MOST_PORTS = 32  # that are tried: clusters on one machine are given the same one


class About(NamedTuple):
    """The cluster whose metrics a tracker takes, as it is told."""

    workdir: pathlib.Path  # the run's folder; its name is the run's
    cluster: str
    folder: pathlib.Path  # the cluster's folder

    @property
    def id(self) -> str:
        """A name that is the same when the run is resumed."""
        return hashlib.sha256(str(self.folder.resolve()).encode()).hexdigest()[:16]

    @property
    def settings(self) -> dict[str, str]:
        """The flags set in `run.flags`, without those of the connection."""
        paths = [each / "run.flags" for each in (self.folder, self.workdir)]
        path = next((each for each in paths if each.is_file()), None)
        lines = path.read_text("utf-8").splitlines() if path else ()
        flags = [line[2:].partition("=") for line in lines if line.startswith("--")]
        return {
            name: value if is_set else "true"
            for name, is_set, value in flags
            if (value or not is_set) and name not in PRIVATE
        }


class WandB:
    """A run of Weights & Biases for each cluster, in a group for all of them."""

    def __init__(self, about: About) -> None:
        """Begins a run, or resumes it; WANDB_MODE and others of its variables hold."""
        with installed.extra("wandb"):
            import wandb
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            group=about.workdir.name,
            name=f"{about.workdir.name} {about.cluster}",
            id=about.id,
            dir=str(about.folder),
            config=about.settings,
            resume="allow",
            # What is printed names other organizations; code and machine nobody needs.
            settings=wandb.Settings(
                console="off", disable_git=True, save_code=False, x_disable_meta=True
            ),
        )
        # A run that is resumed takes steps again that W&B has seen: its own count of
        # steps cannot go back, a metric can.
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Sends the values of a step."""
        self._run.log({"step": step, **metrics.flat(values)})

    def close(self) -> None:
        """Waits until all is sent."""
        self._run.finish()


class Trackio:
    """A run of Trackio for each cluster, on this machine: `trackio show`."""

    def __init__(self, about: About) -> None:
        """Begins a run, or resumes it."""
        with installed.extra("trackio"):
            import trackio
        self._run = trackio.init(
            project=PROJECT,
            name=f"{about.workdir.name} {about.cluster} {about.id[:4]}",
            group=about.workdir.name,
            config=about.settings,
            resume="allow",
        )

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Records the values of a step."""
        self._run.log(metrics.flat(values), step=step)

    def close(self) -> None:
        """Waits until all is written."""
        self._run.finish()


class MLflow:
    """A run of MLflow for each cluster, in the experiment of their run."""

    def __init__(self, about: About) -> None:
        """Begins a run at MLFLOW_TRACKING_URI, or resumes the one of `mlflow_run`."""
        with installed.extra("mlflow"):
            import mlflow
        self._metric = mlflow.entities.Metric
        known, name = about.folder / "mlflow_run", about.workdir.name
        # Clusters begin at once: the first one makes a new database, and an experiment.
        with _alone(about.workdir):
            self._client = mlflow.MlflowClient()
            if known.is_file():
                self._id = known.read_text()
                return
            named = self._client.get_experiment_by_name(name)
            if named is None:
                self._client.create_experiment(name)
                named = self._client.get_experiment_by_name(name)
        run = self._client.create_run(named.experiment_id, run_name=about.cluster)
        self._id = run.info.run_id
        with files.writing(known) as partial:  # whatever fails now, it is resumed
            partial.write_text(self._id)
        for name, value in about.settings.items():
            self._client.log_param(self._id, name, value)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Sends the values of a step."""
        now = int(1000 * time.time())
        found = [
            self._metric(re.sub(r"[^\w./ -]", "_", name), float(value), now, step)
            for name, value in metrics.flat(values).items()
        ]
        self._client.log_batch(self._id, metrics=found)

    def close(self) -> None:
        """Ends the run."""
        self._client.set_terminated(self._id)


@contextlib.contextmanager
def _alone(folder: pathlib.Path) -> Iterator[None]:
    """Lets one process of this machine after the other in."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


class Prometheus:
    """The newest value of each metric, as gauges that Prometheus reads over HTTP.

    `nebula_NAME{cluster="generator:0", of=""}`; `of` is a language, or a peer.
    """

    def __init__(self, address: str, cluster: str) -> None:
        """Listens at [HOST:]PORT, or at the next port that is free.

        Raises errors.NebulaError if no port is, or the host is not this machine's.
        """
        with installed.extra("prometheus"):
            import prometheus_client
        self._cluster, self._made = cluster, dict[str, Any]()
        self._registry = prometheus_client.CollectorRegistry()
        self._gauge = prometheus_client.Gauge
        host, first = _address(address)
        for port in range(first, min(first + MOST_PORTS, 2**16)):
            try:
                self._server, self._thread = prometheus_client.start_http_server(
                    port, addr=host, registry=self._registry
                )
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    continue
                raise errors.NebulaError(
                    f"metrics_port={address}: {error.strerror}"
                ) from None
            where = endpoints.written((host, self._server.server_port))
            process.message(f"{cluster}: metrics at http://{where}/metrics")
            return
        raise errors.NebulaError(
            f"metrics_port={address}: {MOST_PORTS} ports from there on are in use"
        )

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Shows the values of a step from now on."""
        for name, value in {"step": step, **values}.items():
            of_each = value if isinstance(value, Mapping) else {"": value}
            for key, number in of_each.items():
                self._of(name).labels(self._cluster, key).set(number)

    def _of(self, name: str) -> Any:
        name = re.sub(r"\W", "_", f"nebula_{name}", flags=re.ASCII)
        if name not in self._made:
            about = "Newest value in metrics.jsonl."
            labels = ["cluster", "of"]
            self._made[name] = self._gauge(name, about, labels, registry=self._registry)
        return self._made[name]

    def close(self) -> None:
        """Listens no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


MADE_BY: Mapping[str, Callable[[About], metrics.Tracker]] = {
    "wandb": WandB,
    "trackio": Trackio,
    "mlflow": MLflow,
}
"""Name in --tracker -> what makes a tracker."""


class Trackers:
    """A group of trackers, of which one that fails is left out from then on."""

    def __init__(self, trackers: Sequence[metrics.Tracker]) -> None:
        """Takes trackers that are open."""
        self._trackers = list(trackers)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Gives the values of a step to all."""
        self._each(lambda tracker: tracker.write(step, values))

    def close(self) -> None:
        """Closes all."""
        self._each(lambda tracker: tracker.close())

    def _each(self, function: Callable[[metrics.Tracker], None]) -> None:
        for each in list(self._trackers):
            try:
                function(each)
            except Exception as error:  # a service may fail by any, and no run for it
                self._trackers.remove(each)
                _left_out(type(each).__name__, error)


def _left_out(name: str, error: Exception) -> None:
    process.message(
        f"{name} takes no more metrics, and the run goes on: {type(error).__name__}:"
        f" {printable.line(str(error))}"
    )


def check(given: Sequence[str | metrics.Tracker], metrics_port: str) -> None:
    """Raises errors.SettingsError or installed.MissingExtra if one cannot open."""
    for each in given:
        if isinstance(each, str):
            _maker(each)
    if metrics_port:
        _address(metrics_port)
        with installed.extra("prometheus"):
            importlib.import_module("prometheus_client")


def opened(
    given: Sequence[str | metrics.Tracker], metrics_port: str, about: About
) -> Trackers:
    """Opens trackers, names of MADE_BY or `module:name`, or takes those that are open.

    One that cannot be opened is left out. `Prometheus` is at a `metrics_port`.
    """
    found: list[metrics.Tracker] = []
    for each in given:
        try:
            found.append(_maker(each)(about) if isinstance(each, str) else each)
        except errors.NebulaError:
            raise
        except Exception as error:  # as of a service that wants a key
            _left_out(str(each), error)
    if metrics_port:
        try:
            found.append(Prometheus(metrics_port, about.cluster))
        except errors.NebulaError as error:  # the run is connected already
            _left_out("Prometheus", error)
    return Trackers(found)


def _maker(name: str) -> Callable[[About], metrics.Tracker]:
    if name in MADE_BY:
        with installed.extra(name):
            importlib.import_module(name)
        return MADE_BY[name]
    module, colon, path = name.partition(":")
    try:
        if not colon:
            raise ValueError("there is none of this name")
        if not sys.flags.safe_path and os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # a script's path begins with its own folder
        return getattr(importlib.import_module(module), path)
    except (ImportError, AttributeError, ValueError) as error:
        raise errors.SettingsError(
            f"tracker={name}: {error}; expected {', '.join(MADE_BY)} or module:name"
        ) from None


def _address(metrics_port: str) -> tuple[str, int]:
    """Returns host and port of [HOST:]PORT; errors.SettingsError if it is neither."""
    is_port = metrics_port.isascii() and metrics_port.isdigit()
    given = f"{HERE}:{metrics_port}" if is_port else metrics_port
    return endpoints.host_and_port("metrics_port", given)
