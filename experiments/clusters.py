"""What every experiment shares: flags, who this process is, and how it ends.

`--cluster=all` starts each cluster as a process of this machine (see `launcher`);
anything else makes this process that one cluster.
"""

import contextlib
import os
import pathlib
import shlex
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
from absl import app, flags, logging

from nebula_jax import errors
from nebula_jax.communication import bridge, wan
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.security import tls

CLUSTER = flags.DEFINE_string(
    "cluster",
    "all",
    "What this process is: all (starts every cluster here), whole (the same computation"
    " uncut), discriminator, or generator:K.",
)
LISTEN = flags.DEFINE_string(
    "listen",
    "127.0.0.1:0",
    "HOST:PORT where the discriminator waits.",
)
PEER = flags.DEFINE_string("peer", "", "HOST:PORT of the discriminator.")
WORKDIR = flags.DEFINE_string(
    "workdir", "", "The run's folder; runs/<flagfile's name> if empty."
)
DATA_DIR = flags.DEFINE_string(
    "data_dir", "package:django", "A text folder (see README.md), or package:django."
)
PREPARED_DIR = flags.DEFINE_string(
    "prepared_dir", "prepared", "Where tokenised corpora are kept between runs."
)
STEPS = flags.DEFINE_integer("steps", 1000, "Optimisation steps.", lower_bound=1)
BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", 16, "Sequences per step of each generator.", lower_bound=1
)
SEED = flags.DEFINE_integer("seed", 0, "Of everything random.", lower_bound=0)
WINDOW = flags.DEFINE_integer(
    "window", 2, "Steps that a generator may be ahead; 0 takes turns.", lower_bound=0
)
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
    "wan", "", "Emulated line, such as 60mbit,15ms: rate each way, one-way delay."
)
TLS = flags.DEFINE_string(
    "tls",
    "auto",
    "auto (certificates made for the run with --cluster=all, else off), off, or a"
    " folder with ca.pem, cert.pem and key.pem.",
)
CONNECT_TIMEOUT = flags.DEFINE_float(
    "connect_timeout", 60.0, "Seconds to wait for the other clusters to come."
)
PEER_TIMEOUT = flags.DEFINE_float(
    "peer_timeout", 30.0, "Seconds of silence after which a peer counts as gone."
)
CHECKPOINT_EVERY = flags.DEFINE_integer(
    "checkpoint_every", 100, "Steps between checkpoints.", lower_bound=1
)
LOG_EVERY = flags.DEFINE_integer(
    "log_every", 10, "Steps between progress lines.", lower_bound=1
)

LISTEN_FD = "NEBULA_LISTEN_FD"  # set by the launcher: an inherited listening socket
LIFELINE_FD = "NEBULA_LIFELINE_FD"  # set by the launcher: closes when it is gone

STOPPED_BY_PEER = 3  # exit status: ended early, state saved, because a peer asked


class FlagError(errors.NebulaError):
    """Flags that do not go together."""


def workdir() -> pathlib.Path:
    """The run's folder."""
    if WORKDIR.value:
        return pathlib.Path(WORKDIR.value)
    for argument in reversed(sys.argv):
        if "flagfile=" in argument:
            return pathlib.Path("runs") / pathlib.Path(argument.split("=", 1)[1]).stem
    return pathlib.Path("runs") / pathlib.Path(sys.argv[0]).stem


def cluster_folder(cluster: str) -> pathlib.Path:
    """Where a cluster keeps its files: `generator:0` -> <workdir>/generator-0."""
    return workdir() / cluster.replace(":", "-")


def host_and_port(flag: str, value: str) -> tuple[str, int]:
    """`HOST:PORT` -> (host, port)."""
    host, _, port = value.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise FlagError(f"--{flag}={value}: expected HOST:PORT")
    return host.strip("[]"), int(port)


def check_shared_flags() -> None:
    """Raises FlagError (or NebulaError) at what cannot work, before anything starts."""
    wan.from_string(WAN.value)
    for flag in (CONNECT_TIMEOUT, PEER_TIMEOUT):
        if not 0 < flag.value < float("inf"):
            raise FlagError(f"--{flag.name}={flag.value:g}: must be above 0 seconds")
    if CLUSTER.value.startswith("generator:"):
        if not PEER.value:
            raise FlagError(
                f"--cluster={CLUSTER.value} needs --peer=HOST:PORT of the discriminator"
            )
        host_and_port("peer", PEER.value)
    elif PEER.value:
        raise FlagError(f"--peer is for a generator, not for --cluster={CLUSTER.value}")
    port = host_and_port("listen", LISTEN.value)[1]
    if CLUSTER.value == "discriminator" and not port and LISTEN_FD not in os.environ:
        raise FlagError("--cluster=discriminator needs --listen=HOST:PORT")
    if DEVICES.value and DEVICES.value % MODEL_PARALLEL.value:
        raise FlagError(
            f"--model_parallel={MODEL_PARALLEL.value} does not divide"
            f" --devices_per_cluster={DEVICES.value}"
        )


def mesh() -> jax.sharding.Mesh:
    """This cluster's devices as a mesh; on CPU as many as asked for are simulated."""
    if DEVICES.value:
        jax.config.update("jax_num_cpu_devices", DEVICES.value)
    found = jax.devices()
    if DEVICES.value > len(found):
        raise FlagError(
            f"--devices_per_cluster={DEVICES.value}: this machine has {len(found)}"
        )
    found = found[: DEVICES.value or None]
    made = mesh_lib.make_mesh(found, MODEL_PARALLEL.value)
    if BATCH_SIZE.value % made.shape["data"]:
        raise FlagError(
            f"--batch_size={BATCH_SIZE.value} does not divide evenly over"
            f" {made.shape['data']} devices"
        )
    return made


def client_tls() -> ssl.SSLContext | None:
    """What a generator connects with; None for plain TCP."""
    if TLS.value in ("auto", "off"):
        return None
    return tls.client_context(pathlib.Path(TLS.value))


def server_tls() -> Callable[[], ssl.SSLContext] | None:
    """What the discriminator accepts with; None for plain TCP."""
    if TLS.value in ("auto", "off"):
        return None
    return tls.server_contexts(pathlib.Path(TLS.value))


def listening_socket() -> socket.socket:
    """The discriminator's socket: the launcher's, or one bound to --listen."""
    if LISTEN_FD in os.environ:
        return socket.socket(fileno=int(os.environ[LISTEN_FD]))
    return bridge.listen(host_and_port("listen", LISTEN.value))


def write_run_flags(path: pathlib.Path, overrides: dict[str, Any]) -> None:
    """Writes every flag of the experiment, so that the file alone repeats the run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"# {command()}", f"# commit {commit()}"]
    lines += flag_arguments(overrides)
    path.write_text("\n".join(lines) + "\n")


def command() -> str:
    """The command that started this process, as a person would type it."""
    module = sys.modules["__main__"].__spec__.name
    return shlex.join(["python", "-m", module, *sys.argv[1:]])


def flag_arguments(overrides: dict[str, Any]) -> list[str]:
    """The experiment's flags as arguments, some of them replaced."""
    main_module = sys.modules["__main__"]
    arguments = []
    for flag in flags.FLAGS.get_key_flags_for_module(main_module):
        value = overrides.get(flag.name, flag.value)
        if isinstance(value, bool):
            arguments.append(f"--{flag.name}" if value else f"--no{flag.name}")
        else:
            arguments.append(f"--{flag.name}={value}")
    return arguments


def commit() -> str:
    """The commit of this checkout, with + if files differ from it; or `unknown`."""
    git = ["git", "-C", str(pathlib.Path(__file__).parent)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True
        )
        dirty = subprocess.run(
            [*git, "status", "--porcelain"], capture_output=True, text=True
        )
    except OSError:
        return "unknown"
    name = head.stdout.strip()
    return name + ("+" if dirty.stdout.strip() else "") if name else "unknown"


class Interrupt:
    """A request to stop: Ctrl-C, SIGTERM, or the launcher gone. The second is final."""

    def __init__(self):
        self._signal: int | None = None
        self.is_graceful = False
        """Whether there is something to save; else the first request is final too."""

    def install(self) -> "Interrupt":
        """Catches the signals of this process, and watches the launcher's lifeline."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        if LIFELINE_FD in os.environ:
            fd = int(os.environ[LIFELINE_FD])
            threading.Thread(target=self._watch, args=(fd,), daemon=True).start()
        return self

    def _on_signal(self, number, frame) -> None:
        del frame
        if self._signal is not None or not self.is_graceful:
            os._exit(128 + number)
        self._signal = number

    def _watch(self, fd: int) -> None:
        os.read(fd, 1)  # returns when the launcher's end is closed, however it died
        os.kill(os.getpid(), signal.SIGTERM)

    @property
    def requested(self) -> bool:
        """Whether the run should end soon."""
        return self._signal is not None

    @property
    def status(self) -> int:
        """Exit status of a run that ended early."""
        return 128 + self._signal if self._signal else STOPPED_BY_PEER


def exit_status(step: int, interrupt: Interrupt) -> int:
    """Exit status of a cluster whose last step was `step`, all saved."""
    if step >= STEPS.value:
        return 0
    say(f"{CLUSTER.value}: stopped after step {step}; the same command goes on")
    return interrupt.status


def say(text: str) -> None:
    """A message for a person, apart from the progress lines on standard output."""
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def timed(what: str) -> Iterator[None]:
    """Says how long something took that a person waits for."""
    start = time.monotonic()
    yield
    say(f"{what}: {time.monotonic() - start:.1f} s")


def run(main: Callable[[], int]) -> None:
    """Entry point of an experiment: parses flags, and prints errors as one line.

    Args:
      main: does the work, returns the exit status: 0 done, 1 error, 2 bad flags,
        3 stopped for a peer, 128 + n stopped by signal n; stopped means saved.
    """

    def parse(argv):
        try:
            return flags.FLAGS(argv)
        except flags.Error as error:
            say("error: " + " ".join(str(error).split()))
            sys.exit(2)

    def guarded(argv):
        logging.set_verbosity(logging.WARNING)  # the libraries' chatter
        if len(argv) > 1:
            say(f"error: what is {argv[1]!r}? Every argument is a --flag")
            return 2
        try:
            return main()
        except FlagError as error:
            say(f"error: {error}")
            return 2
        except (errors.NebulaError, OSError) as error:
            say(f"error: {error}")
            return 1

    app.run(guarded, flags_parser=parse)
