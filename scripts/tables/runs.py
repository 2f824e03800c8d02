"""Runs of a table: each is done once, and what it left is kept.

A table takes hours, so every run's figures are written as soon as it has ended, to a
small file of its own; the same command goes on with the runs that are missing, and with
the one that it was stopped in.
"""

import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from absl import flags

from experiments import lifecycle, run_report, shared_flags
from nebula_jax import errors, files
from scripts.out import OUT

SCALE = flags.DEFINE_string("scale", "", "How large the runs are.")
SEEDS = flags.DEFINE_string(
    "seeds", "", "How many seeds each row is the mean of, or which, as in 0,1,2."
)

FOLDER = pathlib.Path(__file__).parents[2] / "experiments"
BESIDE = FOLDER.parents[1] / "shared" / "data"
LOG_LINES = 12  # of a failed run, in the error
UNDER_WAY = "under_way.json"
"""In the folder of a run that has not ended: which it is, and its seconds so far (but
not those of a part that was killed)."""


class Folder(NamedTuple):
    """A folder of a run that others use."""

    name: str
    """Under the table's `models/`."""
    path: str
    """In the run's own folder."""


class Run(NamedTuple):
    """One run of an experiment."""

    name: str
    """Also of its files: `quality-int8-seed0`."""
    module: str
    """As in `python -m MODULE`."""
    arguments: tuple[str, ...]
    """All but --workdir."""
    shares: Folder | None = None
    """Runs that say the same find what the first of them made."""
    makes: Folder | None = None
    """What this run is there for; others use it."""
    after: "Run | None" = None
    """The run that made what this one uses."""


Execute = Callable[[Run, pathlib.Path], None]


class Runs:
    """The runs of a table, in a folder of theirs."""

    def __init__(
        self,
        folder: pathlib.Path,
        figures: Callable[[Run, pathlib.Path], dict[str, Any]],
        execute: Execute | None = None,
    ):
        """Takes what is there.

        Args:
          folder: `results/` has the figures of finished runs, `run/` the one under way.
          figures: (run, its folder) -> what the table needs of it; `summary` at least.
          execute: starts a run and waits for its end; the real command if not given.
        """
        self.folder = folder
        self._figures = figures
        self._execute = execute or start
        self._commit = shared_flags.commit()
        self._other_commits: set[str] = set()

    def path(self, name: str) -> pathlib.Path:
        """Where a run's figures are, once it has ended."""
        return self.folder / "results" / f"{name}.json"

    def made(self, name: str) -> pathlib.Path:
        """Where a folder is that a run made and others use."""
        return self.folder / "models" / name

    def found(self, run: Run) -> dict[str, Any] | None:
        """The figures of a run that has ended, else None.

        Raises:
          errors.NebulaError: if they are of other flags.
        """
        path = self.path(run.name)
        if not path.is_file():
            return None
        result = json.loads(path.read_text())
        if result["identity"] != identity(run):
            raise errors.NebulaError(
                f"{path} was run with other flags ({' '.join(result['arguments'])}), or"
                " on what a run with other flags made; remove it, or name another"
                " --workdir"
            )
        commit = result["summary"]["commit"]
        if commit != self._commit and commit not in self._other_commits:
            self._other_commits.add(commit)
            lifecycle.say(f"{path} is of commit {commit}; now it is {self._commit}")
        return result

    def result(self, run: Run, like: Run | None = None) -> dict[str, Any]:
        """The figures of a run, which is done now unless it has been.

        Args:
          run: which.
          like: one that has ended, with the same flags but for what they use: what its
            own `after` made. If both made the same bytes, its figures are this one's.
        """
        found = self.found(run)
        if found is not None:
            return found
        if like is not None and self._uses_the_same(run, like):
            lifecycle.say(f"{run.name}: byte for byte what {like.name} began with")
            result = self.found(like)
            summary = result["summary"] | {"seconds": 0.0}
            return self._write(run, result | {"summary": summary, "same_as": like.name})
        workdir = self.folder / "run"
        before = self._begin(run, workdir)
        begin = time.monotonic()
        try:
            with lifecycle.timed(run.name):
                self._execute(run, workdir)
        finally:
            seconds = before + time.monotonic() - begin
            self._mark(run, workdir, seconds)
        if run.makes is not None:
            self._keep(workdir, run.makes)
        if run.shares is not None and not self.made(run.shares.name).is_dir():
            self._keep(workdir, run.shares)
        figures = self._figures(run, workdir)
        if before:  # the summary counts from when it went on
            figures["summary"]["seconds"] = round(seconds, 1)
        result = self._write(run, figures)
        shutil.rmtree(workdir)
        return result

    def _write(self, run: Run, figures: Mapping[str, Any]) -> dict[str, Any]:
        about = {"arguments": list(run.arguments), "identity": identity(run)}
        result = {**figures, **about}
        path = self.path(run.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(result) + "\n")
        partial.replace(path)
        return result

    def _uses_the_same(self, run: Run, like: Run) -> bool:
        """Whether what made the folders that two runs use made the same bytes."""
        ours, theirs = (
            _digests(self.made(each.after.makes.name)) for each in (run, like)
        )
        return bool(ours) and ours == theirs

    def _begin(self, run: Run, workdir: pathlib.Path) -> float:
        """Makes the folder of a run unless it is there; the seconds it has had."""
        path = workdir / UNDER_WAY
        there = json.loads(path.read_text()) if path.is_file() else {}
        says = f"{run.name}: {' '.join(run.arguments)}"
        if there.get("run") == [identity(run), self._commit]:
            lifecycle.say(f"{says} (goes on after {there['seconds']:.0f} s)")
            return there["seconds"]
        lifecycle.say(says)
        shutil.rmtree(workdir, ignore_errors=True)
        workdir.mkdir(parents=True)
        if run.shares is not None and self.made(run.shares.name).is_dir():
            shutil.copytree(self.made(run.shares.name), workdir / run.shares.path)
        self._mark(run, workdir, 0.0)
        return 0.0

    def _mark(self, run: Run, workdir: pathlib.Path, seconds: float) -> None:
        about = {"run": [identity(run), self._commit], "seconds": seconds}
        path = workdir / UNDER_WAY
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(about) + "\n")
        partial.replace(path)

    def _keep(self, workdir: pathlib.Path, folder: Folder) -> None:
        """Takes a folder of a run for others, in the place of an older one."""
        if not (workdir / folder.path).is_dir():
            return
        made = self.made(folder.name)
        shutil.rmtree(made, ignore_errors=True)
        made.parent.mkdir(exist_ok=True)
        (workdir / folder.path).rename(made)


def _digests(folder: pathlib.Path) -> dict[pathlib.Path, str]:
    """File -> digest of its bytes; empty if there is no such folder."""
    return {
        path.relative_to(folder): files.digest(path)
        for path in folder.rglob("*")
        if path.is_file()
    }


def start(run: Run, workdir: pathlib.Path) -> None:
    """Runs the real command to its end.

    Raises:
      errors.NebulaError: if it failed, with the last it said.
    """
    command = [
        *(sys.executable, "-m", run.module),
        *run.arguments,
        f"--workdir={workdir}",
    ]
    cache = {"JAX_COMPILATION_CACHE_DIR": str(workdir.parent.resolve() / "compiled")}
    log = workdir / "log.txt"
    with log.open("w") as stream:
        status = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=cache | os.environ,
        ).returncode
    if status:
        said = "\n  ".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
        raise errors.NebulaError(
            f"{run.name} ended with status {status}; {log} ends with\n  {said}"
        )


def summary_of(run: Run, workdir: pathlib.Path) -> dict[str, Any]:
    """What most tables need of a finished run: its summary."""
    del run
    return {"summary": json.loads((workdir / "summary.json").read_text())}


def provenance(
    commits: Iterable[str], seconds: float, seeds: Sequence[str]
) -> dict[str, Any]:
    """What every table's figures begin with.

    Args:
      commits: of the runs.
      seconds: that they took together.
      seeds: of the table.
    """
    return {
        "command": shared_flags.command(),
        "commit": ", ".join(sorted(set(commits))),
        "hardware": run_report.hardware(),
        "seconds": round(seconds, 1),
        "seeds": list(seeds),
    }


def write(result: Mapping[str, Any], name: str) -> pathlib.Path:
    """Writes a table's figures to --out or into the results, and says where.

    Args:
      result: with its `targets`, if it has any.
      name: of the table.

    Returns:
      The file.
    """
    out = pathlib.Path(OUT.value or FOLDER / "results" / f"{name}.json")
    out.write_text(json.dumps(result, indent=1) + "\n")
    for each in result.get("targets", ()):
        met = "met    " if each["met"] else "NOT met"
        print(f"{met} {each['what']}: {each['value']:.3f}")
    print(f"all of it: {out}; python -m scripts.make_tables puts it into the README")
    return out


def scale(known: Sequence[str]) -> str:
    """--scale, by default the first that is known.

    Raises:
      FlagError: at another.
    """
    if SCALE.value and SCALE.value not in known:
        raise shared_flags.FlagError(
            f"--scale={SCALE.value}: there is {', '.join(known)} here"
        )
    return SCALE.value or known[0]


def seeds(count: int) -> list[str]:
    """--seeds, by default 0 to `count` - 1.

    Raises:
      FlagError: if it is neither a number nor a list of them.
    """
    given = SEEDS.value or str(count)
    parts = [part.strip() for part in given.split(",")]
    if parts[1:] and not parts[-1]:  # `5,` is the seed 5
        del parts[-1]
    if not all(part.isdecimal() for part in parts):
        raise shared_flags.FlagError(
            f"--seeds={given}: expected a number of seeds, or seeds such as 0,1,2"
        )
    if "," not in given:
        parts = [str(seed) for seed in range(int(given))]
    if not parts or len(set(parts)) != len(parts):
        raise shared_flags.FlagError(f"--seeds={given}: at least one, each once")
    return parts


def identity(run: Run) -> str:
    """Of all that a run's figures depend on, but for the code."""
    parts = [run.module, *run.arguments, digest(run.arguments)]
    if run.after is not None:
        parts.append(identity(run.after))
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def digest(arguments: Sequence[str]) -> str:
    """Of the flagfiles among arguments, without comments."""
    hashed = hashlib.sha256()
    for argument in arguments:
        flag, _, value = argument.partition("=")
        if flag == "--flagfile":
            hashed.update(json.dumps(settings(pathlib.Path(value))).encode())
    return hashed.hexdigest()[:16]


def settings(flagfile: pathlib.Path) -> dict[str, str]:
    """Flag -> value of a flagfile; `true` where it has none."""
    lines = [line.strip() for line in flagfile.read_text().splitlines()]
    parts = [
        line.removeprefix("--").partition("=") for line in lines if line[:2] == "--"
    ]
    return {flag: value if equals else "true" for flag, equals, value in parts}


def flagfile(name: str) -> pathlib.Path:
    """A flagfile of this repository, as a person would name it from here."""
    return pathlib.Path(os.path.relpath(FOLDER / "flags" / f"{name}.flags"))


def data_dir() -> str:
    """--data_dir; if it is not given, `shared/data` beside the repository.

    Raises:
      FlagError: if neither is there.
    """
    given = shared_flags.DATA_DIR.value
    if not given.startswith("package:"):
        return given
    if BESIDE.is_dir():
        return os.path.relpath(BESIDE)
    raise shared_flags.FlagError(
        "--data_dir is missing: a text folder (see README.md) with translations and"
        f" sentence pairs, which {given} has not"
    )


def base_arguments(flagfile: pathlib.Path) -> tuple[str, ...]:
    """What all runs of a table are given."""
    return (
        f"--flagfile={flagfile}",
        f"--data_dir={data_dir()}",
        f"--pretrained_dir={shared_flags.PRETRAINED_DIR.value}",
        f"--prepared_dir={shared_flags.PREPARED_DIR.value}",
    )
