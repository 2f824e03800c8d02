"""Runs of the real command, tiny, as separate processes."""

import contextlib
import functools
import importlib
import io
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from unittest import mock

import configured
import psutil
import trees
from absl.testing import flagsaver

from nebula_jax.commands import command_line
from nebula_jax.runtime.life import process as process_lib
from nebula_jax.runtime.ranks import devices
from nebula_jax.training import checkpoint

SECONDS = 200.0  # for a run; with a busy machine it may take half of that
ROOT = pathlib.Path(__file__).parents[2]
FAILING_DISK = pathlib.Path(__file__).parent / "failing_disk"
QUICK_START = pathlib.Path(__file__).parent / "quick_start"
QUICK_PATH = f"{ROOT}{os.pathsep}{QUICK_START}"
"""For PYTHONPATH: the project, in processes that start soon."""

SENTENCES = {
    "en": "the {} has {} doors and {} windows",
    "de": "das {} hat {} Türen und {} Fenster",
    "sw": "{} ina milango {} na madirisha {}",
}
THINGS = ["house", "school", "office", "church", "station", "castle", "barn"]

TINY = {
    "generators": "en de|sw",
    "task_mix": "mrtd=1 trtd=1|mrtd",
    "vocab_size": 120,
    "generator_size": "nano",
    "discriminator_size": "nano",
    "generator_layers": 1,  # which are soon compiled
    "discriminator_layers": 1,
    "max_length": 16,
    "batch_size": 4,
    "learning_rate": 1e-3,
    "warmup_steps": 2,
    "dropout": 0.1,
    "eval_every": 4,
    "eval_batches": 1,
    "log_every": 2,
    "connect_timeout": 60,
    "peer_timeout": 20,
    "devices_per_cluster": 1,
}


def write_text(folder: pathlib.Path, languages=tuple(SENTENCES)) -> pathlib.Path:
    """A text folder in the project's format."""
    (folder / "mono").mkdir(parents=True)
    (folder / "parallel").mkdir()
    for language in languages:
        for split, count in (("train", 150), ("valid", 30)):
            lines = [
                SENTENCES[language].format(THINGS[n % 7], n, n * 3 % 17)
                for n in range(count)
            ]
            path = folder / "mono" / f"{language}.{split}.txt"
            path.write_text("".join(line + "\n" for line in lines))
    for language in languages[1:]:
        rows = [f"en\t{language}"]
        for n in range(120):
            fields = (THINGS[n % 7], n, n * 5 % 13)
            sides = (SENTENCES[name].format(*fields) for name in ("en", language))
            rows.append("\t".join(sides))
        path = folder / "parallel" / f"en-{language}.train.tsv"
        path.write_text("".join(row + "\n" for row in rows))
    return folder


class Runs:
    """Starts the command in a folder of its own."""

    module = "experiments.pretrain_m3"
    prefix: tuple[str, ...] = ()  # what runs the command, such as `ip netns exec NAME`

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.text = self.write_text(folder / "text")

    def write_text(self, folder: pathlib.Path) -> pathlib.Path:
        """Writes the corpus of all runs; its folder."""
        return write_text(folder)

    def write_part(self, name: str, languages: Iterable[str]) -> pathlib.Path:
        """Copies the text of some languages into a folder of that name."""
        for path in self.text.rglob("*.t*"):
            if path.name.split(".")[0].removeprefix("en-") in languages:
                target = self.folder / name / path.relative_to(self.text)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, target)
        return self.folder / name

    def flags(self) -> dict:
        """What a run is given unless a test says otherwise."""
        return TINY | {"data_dir": self.text, "prepared_dir": "prepared"}

    def environment(self) -> dict[str, str]:
        """Returns this process's environment with the project on the path."""
        return os.environ | {"PYTHONPATH": QUICK_PATH}

    def given(self, *arguments: str, **flags) -> list[str]:
        """The command's arguments: flags by name, and others."""
        flags = self.flags() | flags
        return [*(f"--{name}={value}" for name, value in flags.items()), *arguments]

    def start(self, *arguments: str, failing="", **flags) -> subprocess.Popen:
        """Starts a run; its standard error is merged into its output. failing: what its
        disk refuses, see helpers/failing_disk."""
        given = self.given(*arguments, **flags)
        environment = self.environment()
        if failing:
            environment["FAILING_DISK"] = failing
            # In the place of QUICK_START: Python imports one sitecustomize.
            environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{FAILING_DISK}"
        return subprocess.Popen(
            [*self.prefix, sys.executable, "-m", self.module, *given],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *arguments: str, timeout: float = SECONDS, **flags):
        """Runs to the end; (exit status, output)."""
        return self.end_of(self.start(*arguments, **flags), timeout)

    def finished(self, *arguments: str, timeout: float = SECONDS, **flags) -> str:
        """Runs to the end, and well; its output."""
        status, output = self.run(*arguments, timeout=timeout, **flags)
        assert status == 0, output
        return output

    def run_here(self, *arguments: str, **flags) -> tuple[int, str]:
        """As `run`, in this process, which has imported all: for what compiles nothing
        itself, as --cluster=all does. This process has more devices than the clusters,
        so that a program of its own is none of theirs in the cache."""
        command, output = importlib.import_module(self.module), io.StringIO()
        # Its flags of array_record would go with a flagsaver's block.
        importlib.import_module("nebula_jax.data.packed_text")
        given = self.given(*arguments, **flags)
        with (
            contextlib.chdir(self.folder),
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(output),
            flagsaver.flagsaver(),
            mock.patch("sys.argv", [self.module, *given]),
            mock.patch.dict(os.environ, self.environment()),
            mock.patch.object(devices, "simulate"),  # JAX has its devices
            handlers_put_back(),
        ):
            configured.parse(command.config, *given)
            main = functools.partial(command_line.with_flags, command.main)
            status = process_lib.guarded(main)
        return status, output.getvalue()

    def finished_here(self, *arguments: str, **flags) -> str:
        status, output = self.run_here(*arguments, **flags)
        assert status == 0, output
        return output

    def flag(self, workdir: str, name: str) -> str:
        """A flag of a run, as its run.flags has it."""
        lines = (self.folder / workdir / "run.flags").read_text().splitlines()
        return dict(line.partition("=")[::2] for line in lines)[f"--{name}"]

    def end_of(self, process: subprocess.Popen, timeout: float):
        """(exit status, output) of a run that has been started."""
        try:
            output, _ = process.communicate(timeout=timeout)
        finally:
            process.kill()
        return process.returncode, output

    def start_and_wait(
        self, workdir: str, step: int, folders: Iterable[str], **flags
    ) -> tuple[subprocess.Popen, dict[str, psutil.Process]]:
        """Starts a run, waits until `step` is saved in each cluster's folder; returns
        the run, and cluster -> its process."""
        process = self.start(workdir=workdir, **flags)
        saved = [self.folder / workdir / name / "checkpoints" for name in folders]
        # What an earlier run saved is there before the processes are; one cluster alone
        # is the process itself.
        count = len(saved) if len(saved) > 1 else 0
        deadline = time.monotonic() + SECONDS
        while True:
            # It may be gone for a later one by now.
            is_saved = all(newest(each) >= step for each in saved)
            family, status = family_of(process), process.poll()
            if is_saved and (len(family) >= count or status is not None):
                return process, family
            assert status is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def assert_same(self, one: str, other: str, clusters: Iterable[str], step: int):
        """Asserts that two runs have saved the same after `step`, bit for bit."""
        for cluster in clusters:
            trees.assert_same(
                self.state(one, cluster, step), self.state(other, cluster, step)
            )

    def state(self, workdir: str, cluster: str, step: int):
        """The state that a cluster saved after `step`, as numpy arrays."""
        folder = self.folder / workdir / cluster / "checkpoints"
        return checkpoint.read(folder, step)


@contextlib.contextmanager
def handlers_put_back():
    """Puts back the handlers of signals, which a run takes."""
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def newest(folder: pathlib.Path) -> int:
    """Returns the step of the newest checkpoint, 0 if there is none."""
    return max((int(each.name) for each in folder.glob("[0-9]" * 8)), default=0)


def family_of(process: subprocess.Popen) -> dict[str, psutil.Process]:
    """Cluster -> its process, of those that have begun; `generator:0/1` for rank 1."""
    family = {}
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it may end meanwhile
            flags = dict(each.partition("=")[::2] for each in child.cmdline())
            rank = flags.get("--process_id", "0")
            if "--cluster" in flags:
                suffix = f"/{rank}" if int(rank) > 0 else ""
                family[flags["--cluster"] + suffix] = child
    return family


def pause(process: psutil.Process, seconds: float) -> None:
    """Stops a process for a while (SIGSTOP, SIGCONT)."""
    process.suspend()
    time.sleep(seconds)
    process.resume()


def assert_all_gone(family: dict[str, psutil.Process]) -> None:
    """Asserts that no cluster is left behind."""
    _, alive = psutil.wait_procs(family.values(), timeout=10)
    assert not alive, f"left behind: {alive}"
