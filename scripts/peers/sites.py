"""Two sites on this machine, joined by a line that the kernel shapes; needs root."""

import contextlib
import dataclasses
import os
import pathlib
import shutil
import subprocess
from collections.abc import Iterator, Sequence

import psutil

from nebula_jax import errors

ADDRESSES = ("10.77.0.1", "10.77.0.2")


@dataclasses.dataclass(frozen=True)
class Site:
    """A network namespace with one interface and one core of this machine."""

    name: str
    address: str
    device: str
    core: int

    def command(self, arguments: Sequence[str]) -> list[str]:
        """Returns a command as it runs there; it ends when its parent does."""
        inside = ["ip", "netns", "exec", self.name, "setpriv", "--pdeathsig=KILL"]
        return [*inside, "taskset", "-c", str(self.core), *arguments]

    def processes(self) -> Iterator[psutil.Process]:
        """Yields all that run there."""
        for pid in subprocess.check_output(["ip", "netns", "pids", self.name]).split():
            with contextlib.suppress(psutil.NoSuchProcess):
                yield psutil.Process(int(pid))


def check() -> None:
    """Checks that namespaces can be made; errors.SettingsError if not."""
    needed = "ip", "tc", "setpriv", "taskset"
    missing = [each for each in needed if not shutil.which(each)]
    if missing or os.geteuid():
        what = ", ".join(missing) or "root, for network namespaces"
        raise errors.SettingsError(f"bench_peers needs {what}")


@contextlib.contextmanager
def joined(megabits: float | None) -> Iterator[tuple[Site, Site]]:
    """Yields two sites with a line between them; both go with the block.

    The line has so many Mbit/s each way; None is for no limit. A token bucket of the
    kernel is each end of it: no delay is added.
    """
    cores, key = sorted(os.sched_getaffinity(0)), os.getpid()
    names = [f"peers-{key}-{each}" for each in "ab"]
    devices = [f"peer{key}{each}" for each in "ab"]
    with contextlib.ExitStack() as stack:
        for name in names:
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "delete", name)
        ends = ["netns", names[0], "type", "veth", "peer", "name", devices[1]]
        _ip("link", "add", devices[0], *ends, "netns", names[1])
        found = []
        for number, (name, device) in enumerate(zip(names, devices, strict=True)):
            address = ADDRESSES[number]
            _ip("-n", name, "address", "add", f"{address}/24", "dev", device)
            for each in (device, "lo"):
                _ip("-n", name, "link", "set", each, "up")
            if megabits is not None:
                shape = ["rate", f"{megabits}mbit", "burst", "32kb", "latency", "50ms"]
                add = ["tc", "-n", name, "qdisc", "add", "dev", device, "root", "tbf"]
                subprocess.run([*add, *shape], check=True)
            found.append(Site(name, address, device, cores[number % len(cores)]))
        yield found[0], found[1]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def environment(home: pathlib.Path) -> dict[str, str]:
    """Returns the variables of a worker: one thread, this checkout's modules."""
    root = str(pathlib.Path(__file__).parents[2])
    single = {"OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    path = os.environ["PATH"]
    return {"PATH": path, "HOME": str(home), "PYTHONPATH": root, **single}
