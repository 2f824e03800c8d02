"""Runs of the real command, tiny, as separate processes."""

import os
import pathlib
import subprocess
import sys

import orbax.checkpoint as ocp

ROOT = pathlib.Path(__file__).parents[2]

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

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.text = self.write_text(folder / "text")

    def write_text(self, folder: pathlib.Path) -> pathlib.Path:
        """Writes the corpus of all runs; its folder."""
        return write_text(folder)

    def flags(self) -> dict:
        """What a run is given unless a test says otherwise."""
        return TINY | {"data_dir": self.text, "prepared_dir": "prepared"}

    def environment(self) -> dict[str, str]:
        """Returns this process's environment with the project on the path."""
        return os.environ | {"PYTHONPATH": str(ROOT)}

    def start(self, *arguments: str, **flags) -> subprocess.Popen:
        """Starts a run; its standard error is merged into its output."""
        flags = self.flags() | flags
        flags = [f"--{name}={value}" for name, value in flags.items()]
        return self.start_plain(*flags, *arguments)

    def start_plain(self, *arguments: str) -> subprocess.Popen:
        """The same, given nothing but `arguments`."""
        return subprocess.Popen(
            [sys.executable, "-m", self.module, *arguments],
            cwd=self.folder,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *arguments: str, timeout: float = 120, **flags):
        """Runs to the end; (exit status, output)."""
        return self._end_of(self.start(*arguments, **flags), timeout)

    def run_plain(self, *arguments: str, timeout: float = 120):
        """The same, given nothing but `arguments`."""
        return self._end_of(self.start_plain(*arguments), timeout)

    def _end_of(self, process: subprocess.Popen, timeout: float):
        try:
            output, _ = process.communicate(timeout=timeout)
        finally:
            process.kill()
        return process.returncode, output

    def state(self, workdir: str, cluster: str, step: int):
        """The state that a cluster saved after `step`, as numpy arrays."""
        folder = self.folder / workdir / cluster / "checkpoints" / f"{step:08d}"
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            arguments = ocp.args.Composite(state=ocp.args.StandardRestore())
            return checkpointer.restore(folder, args=arguments)["state"]
