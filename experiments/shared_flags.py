"""The flags that every experiment shares, and what is made of them.

`--cluster=all` starts each cluster as a process of this machine (see `launcher`);
anything else makes this process that one cluster.
"""

import itertools
import os
import pathlib
import shlex
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
from absl import flags

from nebula_jax import errors
from nebula_jax.communication import listener as listener_lib
from nebula_jax.communication import wan
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.security import tls

CLUSTER = flags.DEFINE_string(
    "cluster",
    "all",
    "What this process is: all (starts every cluster here), whole (the same computation"
    " uncut), or one cluster: see the experiment.",
)
LISTEN = flags.DEFINE_string(
    "listen",
    "127.0.0.1:0",
    "HOST:PORT where the cluster that waits for the others does so.",
)
PEER = flags.DEFINE_string("peer", "", "HOST:PORT of the cluster that waits.")
WORKDIR = flags.DEFINE_string(
    "workdir", "", "The run's folder; runs/<flagfile's name> if empty."
)
DATA_DIR = flags.DEFINE_string(
    "data_dir", "package:django", "A text folder (see README.md), or package:django."
)
PREPARED_DIR = flags.DEFINE_string(
    "prepared_dir", "prepared", "Where tokenised corpora are kept between runs."
)
PRETRAINED_DIR = flags.DEFINE_string(
    "pretrained_dir", "pretrained", "Where prepared models lie, a folder each."
)
STEPS = flags.DEFINE_integer("steps", 1000, "Optimisation steps.", lower_bound=1)
BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", 16, "Sequences per step (of each generator).", lower_bound=1
)
SEED = flags.DEFINE_integer("seed", 0, "Of everything random.", lower_bound=0)
DEVICES = flags.DEFINE_integer(
    "devices_per_cluster",
    0,
    "Devices of each cluster; 0 for all there are. On CPU that many are simulated.",
    lower_bound=0,
)
MODEL_PARALLEL = flags.DEFINE_integer(
    "model_parallel", 1, "Devices that share one copy of a model.", lower_bound=1
)
WAN = flags.DEFINE_string(
    "wan",
    "",
    "Emulated line, such as 60mbit,15ms: rate each way, one-way delay. Also jitter=2ms,"
    " cut=5s@20s, and up:...;down:... for lines that differ by direction. train_abnet"
    " also takes auto-dilated: as slow beside this machine as the paper's beside its.",
)
TLS = flags.DEFINE_string(
    "tls",
    "auto",
    "Mutual TLS with a folder's ca.pem, cert.pem and key.pem; auto makes them for the"
    " run with --cluster=all; off is plain TCP.",
)
CONNECT_TIMEOUT = flags.DEFINE_float(
    "connect_timeout", 60.0, "Seconds to wait for the other clusters to come."
)
PEER_TIMEOUT = flags.DEFINE_float(
    "peer_timeout", 30.0, "Seconds of silence after which a connection counts as lost."
)
RECONNECT_TIMEOUT = flags.DEFINE_float(
    "reconnect_timeout",
    60.0,
    "Seconds that a lost connection may take to come back; 0 ends the run at once.",
)
CHECKPOINT_EVERY = flags.DEFINE_integer(
    "checkpoint_every", 100, "Steps between checkpoints.", lower_bound=1
)
LOG_EVERY = flags.DEFINE_integer(
    "log_every", 10, "Steps between progress lines.", lower_bound=1
)

LISTEN_FD = "NEBULA_LISTEN_FD"  # set by the launcher: an inherited listening socket


class FlagError(errors.NebulaError):
    """Flags that do not go together."""


def workdir() -> pathlib.Path:
    """The run's folder."""
    if WORKDIR.value:
        return pathlib.Path(WORKDIR.value)
    name = sys.argv[0]
    for argument, value in itertools.pairwise([*sys.argv, ""]):
        flag, equals, inline = argument.lstrip("-").partition("=")
        if flag == "flagfile":  # the first: others may add a line to it
            name = inline if equals else value
            break
    return pathlib.Path("runs") / pathlib.Path(name).stem


def cluster_folder(cluster: str) -> pathlib.Path:
    """Where a cluster keeps its files: `generator:0` -> <workdir>/generator-0."""
    return workdir() / cluster.replace(":", "-")


def host_and_port(flag: str, value: str) -> tuple[str, int]:
    """`HOST:PORT` -> (host, port)."""
    host, _, port = value.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise FlagError(f"--{flag}={value}: expected HOST:PORT")
    return host.strip("[]"), int(port)


def check_shared_flags(listener: str, connector: str, no_line: str = "") -> None:
    """Raises FlagError (or NebulaError) at what cannot work, before anything starts.

    Args:
      listener: name of the cluster that waits.
      connector: name of those that come, as in `generator` of `generator:0`.
      no_line: a value of --wan in whose place the experiment puts a line.
    """
    listens = CLUSTER.value == listener
    connects = CLUSTER.value.partition(":")[0] == connector
    if not no_line or WAN.value != no_line:
        wan.from_string(WAN.value)
    for flag in (CONNECT_TIMEOUT, PEER_TIMEOUT):
        if not 0 < flag.value < float("inf"):
            raise FlagError(f"--{flag.name}={flag.value:g}: must be above 0 seconds")
    if not 0 <= RECONNECT_TIMEOUT.value < float("inf"):
        raise FlagError(
            f"--reconnect_timeout={RECONNECT_TIMEOUT.value:g}: must not be negative"
        )
    if connects:
        if not PEER.value:
            raise FlagError(
                f"--cluster={CLUSTER.value} needs --peer=HOST:PORT of the {listener}"
            )
        host_and_port("peer", PEER.value)
    elif PEER.value:
        raise FlagError(
            f"--peer is for a {connector}, not for --cluster={CLUSTER.value}"
        )
    port = host_and_port("listen", LISTEN.value)[1]
    if listens and not port and LISTEN_FD not in os.environ:
        raise FlagError(f"--cluster={listener} needs --listen=HOST:PORT")
    if DEVICES.value and DEVICES.value % MODEL_PARALLEL.value:
        raise FlagError(
            f"--model_parallel={MODEL_PARALLEL.value} does not divide"
            f" --devices_per_cluster={DEVICES.value}"
        )
    if DEVICES.value:
        _check_batch_divides(DEVICES.value // MODEL_PARALLEL.value)
    if (listens or connects) and TLS.value == "auto":
        raise FlagError(
            f"--cluster={CLUSTER.value} needs --tls=FOLDER with its certificate"
            " (python -m scripts.issue_certificates makes them), or --tls=off for"
            " plain TCP, which anybody on the way can read and change"
        )
    if listens:
        server_tls()
    elif connects:
        client_tls()


def _check_batch_divides(replicas: int) -> None:
    if BATCH_SIZE.value % replicas:
        raise FlagError(
            f"--batch_size={BATCH_SIZE.value} does not divide over {replicas} devices"
        )


def simulate_devices() -> None:
    """On CPU, as many devices as asked for; to be called before JAX is used."""
    if DEVICES.value:
        jax.config.update("jax_num_cpu_devices", DEVICES.value)


def mesh() -> jax.sharding.Mesh:
    """This cluster's devices as a mesh."""
    devices = jax.devices()
    if DEVICES.value > len(devices):
        raise FlagError(
            f"--devices_per_cluster={DEVICES.value}: this machine has {len(devices)}"
        )
    devices = devices[: DEVICES.value or None]
    mesh = mesh_lib.make_mesh(devices, MODEL_PARALLEL.value)
    _check_batch_divides(mesh.shape["data"])
    return mesh


def tls_folder(cluster: str) -> pathlib.Path:
    """Credentials of a cluster when --cluster=all: a sub-folder for each."""
    base = workdir() / "tls" if TLS.value == "auto" else pathlib.Path(TLS.value)
    return base / tls.certificate_name(cluster)


def client_tls() -> Callable[[], ssl.SSLContext] | None:
    """What a cluster connects with; None for plain TCP."""
    if TLS.value == "off":
        return None
    return tls.client_contexts(pathlib.Path(TLS.value))


def server_tls() -> Callable[[], ssl.SSLContext] | None:
    """What the waiting cluster accepts with; None for plain TCP."""
    if TLS.value == "off":
        return None
    return tls.server_contexts(pathlib.Path(TLS.value))


def listening_socket() -> socket.socket:
    """The waiting cluster's socket: the launcher's, or one bound to --listen."""
    if LISTEN_FD in os.environ:
        return socket.socket(fileno=int(os.environ[LISTEN_FD]))
    return listener_lib.listen(host_and_port("listen", LISTEN.value))


def write_run_flags(path: pathlib.Path, overrides: dict[str, Any]) -> None:
    """Writes every flag of the experiment, so that the file alone repeats the run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"# {command()}", f"# commit {commit()}"]
    lines += flag_arguments(overrides)
    path.write_text("\n".join(lines) + "\n")


def take_run_flags(run: str, module: str) -> pathlib.Path:
    """Parses the flags of a run that has been, and this command's own over them.

    Args:
      run: its folder, as given.
      module: of `experiments`, whose run it is to be.

    Returns:
      The folder.

    Raises:
      FlagError: if it is not.
    """
    if not run:
        raise FlagError(f"--run is missing: the folder of a run of {module}")
    folder = pathlib.Path(run)
    path = folder / "run.flags"
    if not path.is_file():
        raise FlagError(f"--run={run}: no run of {module} is there")
    try:
        flags.FLAGS([sys.argv[0], f"--flagfile={path}", *sys.argv[1:]])
    except flags.Error as error:
        reason = " ".join(str(error).split())
        raise FlagError(f"{path} is of no run of {module}: {reason}") from None
    flags.FLAGS["workdir"].value = str(folder)
    return folder


def command() -> str:
    """The command that started this process, as a person would type it."""
    spec = sys.modules["__main__"].__spec__
    module = spec.name if spec else sys.argv[0]
    return shlex.join(["python", "-m", module, *sys.argv[1:]])


def flag_arguments(overrides: dict[str, Any]) -> list[str]:
    """The experiment's flags as arguments, some of them replaced."""
    main_module = sys.modules["__main__"]
    arguments = []
    for flag in flags.FLAGS.get_key_flags_for_module(main_module):
        value = overrides.get(flag.name, flag.value)
        if value is None:  # not given
            continue
        if isinstance(value, bool):
            arguments.append(f"--{flag.name}" if value else f"--no{flag.name}")
        elif isinstance(value, list):
            arguments.append(f"--{flag.name}={','.join(value)}")
        else:
            arguments.append(f"--{flag.name}={value}")
    return arguments


def commit() -> str:
    """The commit of this checkout, with + if files differ from it; or `unknown`.

    Results do not count: a run does not differ because another one has ended.
    """
    git = ["git", "-C", str(pathlib.Path(__file__).parents[1])]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True
        )
        dirty = subprocess.run(
            [*git, "status", "--porcelain", "--", ".", ":!experiments/results"],
            capture_output=True,
            text=True,
        )
    except OSError:
        return "unknown"
    name = head.stdout.strip()
    return name + ("+" if dirty.stdout.strip() else "") if name else "unknown"
