"""Runs of a table: each is done once, and its figures are kept.

A table takes hours, so every run's figures are written to a small file as soon as the
run has ended. The same command goes on with the runs that are missing, and with the one
that it was stopped in.
"""

import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from nebula_jax import errors, files
from nebula_jax.runtime.life import process
from nebula_jax.runtime.records import report
from scripts.tables import config

LOG_LINES = 12  # of a failed run, in the error
UNDER_WAY = "under_way.json"  # of a run that has not ended: its identity and seconds


class Run(NamedTuple):
    """One run of an experiment."""

    name: str  # of the run and of its files: `quality-int8-seed0`
    module: str
    arguments: tuple[str, ...]  # the flags, all but --workdir
    makes: str = ""  # the part of the run's folder that other runs use; it is kept
    after: "Run | None" = None  # the run that made the folder that this one uses


Execute = Callable[[Run, pathlib.Path], None]  # does a run in its folder to the end
Figures = Callable[[Run, pathlib.Path], dict[str, Any]]
"""Reads a finished run's figures in its folder, with its `summary`."""


class Runs:
    """The runs of a table, in one folder."""

    def __init__(
        self,
        folder: pathlib.Path,
        figures: Figures,
        execute: Execute | None = None,
        results: pathlib.Path | None = None,
    ):
        """Resumes with what is in the folder.

        Its `run/` has the run in progress, `models/` what runs make for others, and
        `results/`, or the folder that is given, the figures of finished runs. `execute`
        does a run; the real command if not given.
        """
        self.folder = folder
        self._figures = figures
        self._results = results or folder / "results"
        self._execute = execute or start
        self._commit = report.commit()
        self._other_commits: set[str] = set()
        self._summaries: dict[str, Mapping[str, Any]] = {}

    def provenance(self, seeds: Sequence[str] = ()) -> dict[str, Any]:
        """Describes how the runs whose figures were read came to be.

        A record begins with it, as with `report.provenance`; what is not the same for
        all runs (commits, machines) has all of them.
        """
        runs = list(self._summaries.values())
        seconds = sum(run["seconds"] for run in runs)
        commits = {name for run in runs for name in run["commit"].split(", ")}
        about = report.provenance(seconds, commits=sorted(commits), seeds=seeds)
        machines = [run["hardware"] for run in runs if "hardware" in run]
        if machines:
            about["hardware"] = {name: _all(machines, name) for name in machines[0]}
        # Whoever repeats it does the runs anew, in a folder of their own.
        places = r" --?(results_dir|workdir)[= ]\S+"
        command = re.sub(places, "", about["command"])
        return about | {"command": command}

    def made(self, name: str) -> pathlib.Path:
        """Returns the place of the folder that the run of this name made for others."""
        return self.folder / "models" / name

    def of_seeds(
        self, run_of: Callable[[str], Run], seeds: Sequence[str]
    ) -> dict[str, dict[str, Any]]:
        """Returns seed -> figures of a row's runs; does those that are missing."""
        return {seed: self.result(run_of(seed)) for seed in seeds}

    def result(self, run: Run) -> dict[str, Any]:
        """Returns the figures of a run, which is done now unless it has been.

        The run that made what this one uses is done again if that is gone.

        Raises errors.NebulaError if it has been done with other flags.
        """
        path, before = self._results / f"{run.name}.json", run.after
        if not path.is_file():
            if before and before.makes and not self.made(before.name).is_dir():
                self._do(before)
            return self._do(run)
        result = json.loads(path.read_text())
        if result["identity"] != identity(run):
            raise errors.NebulaError(
                f"{path} was run {_apart(result['arguments'], run.arguments)}. Paths"
                " count as they are given: if it is the same run, go on in its working"
                " directory, with its --data_dir and --workdir; else remove it, or name"
                " another --workdir or --results_dir"
            )
        commit = result["summary"]["commit"]
        if commit != self._commit and commit not in self._other_commits:
            self._other_commits.add(commit)
            process.message(f"{path} is of commit {commit}; now it is {self._commit}")
        self._summaries[run.name] = result["summary"]
        return result

    def _do(self, run: Run) -> dict[str, Any]:
        workdir = self.folder / "run"
        before = self._begin(run, workdir)
        begin = time.monotonic()
        try:
            with process.timed(run.name):
                self._execute(run, workdir)
        finally:
            seconds = before + time.monotonic() - begin
            self._mark(run, workdir, seconds)
        if run.makes:
            self._keep(workdir / run.makes, self.made(run.name))
        figures = self._figures(run, workdir)
        if run.makes:
            figures["made"] = _digests(self.made(run.name))
        if before:  # the summary counts from when it went on
            figures["summary"]["seconds"] = round(seconds, 1)
        result = {
            **figures,
            "arguments": list(run.arguments),
            "identity": identity(run),
        }
        path = self._results / f"{run.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        report.write(path, result)
        self._summaries[run.name] = result["summary"]
        shutil.rmtree(workdir)
        return result

    def _begin(self, run: Run, workdir: pathlib.Path) -> float:
        """Makes the folder of a run unless it is there; returns its seconds so far."""
        path = workdir / UNDER_WAY
        there = json.loads(path.read_text()) if path.is_file() else {}
        line = f"{run.name}: {' '.join(run.arguments)}"
        if there.get("run") == [identity(run), self._commit]:
            process.message(f"{line} (goes on after {there['seconds']:.0f} s)")
            return there["seconds"]
        process.message(line)
        if path.is_file():
            shutil.rmtree(workdir)
        elif workdir.exists() and os.listdir(workdir):
            raise errors.NebulaError(
                f"{workdir} is there and was not made by this script; move it away, or"
                " name another --workdir"
            )
        workdir.mkdir(parents=True, exist_ok=True)
        report.write(path, {})  # from here on it is this script's
        self._mark(run, workdir, 0.0)
        return 0.0

    def _mark(self, run: Run, workdir: pathlib.Path, seconds: float) -> None:
        about = {"run": [identity(run), self._commit], "seconds": seconds}
        report.write(workdir / UNDER_WAY, about)

    def _keep(self, folder: pathlib.Path, made: pathlib.Path) -> None:
        """Moves a folder of a run to where others find it, over an older one."""
        if folder.is_dir():
            shutil.rmtree(made, ignore_errors=True)
            made.parent.mkdir(exist_ok=True)
            folder.rename(made)


def _apart(kept: Sequence[str], now: Sequence[str]) -> str:
    """Renders in words what a run's arguments have that another's have not."""
    only_kept = [each for each in kept if each not in now]
    only_now = [each for each in now if each not in kept]
    if not only_kept and not only_now:
        return "with other flags in a flagfile, or on what a run with other flags made"
    return (
        f"with other flags: {' '.join(only_kept) or 'none'}, where now there is"
        f" {' '.join(only_now) or 'none'}"
    )


def _digests(folder: pathlib.Path) -> dict[str, str]:
    """Returns file -> digest of its bytes; {} if there is no such folder."""
    return {
        str(path.relative_to(folder)): files.digest(path)
        for path in folder.rglob("*")
        if path.is_file()
    }


def start(run: Run, workdir: pathlib.Path) -> None:
    """Runs the real command to its end; a failure shows the last lines of its log."""
    arguments = [*run.arguments, f"--workdir={workdir}"]
    command = [sys.executable, "-m", run.module, *arguments]
    log = workdir / "log.txt"
    # An exception in `subprocess.run` ends the run.
    with process.sigterm_as_exit(), log.open("w") as stream:
        status = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
        ).returncode
    if status:
        last = "\n  ".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
        raise errors.NebulaError(
            f"{run.name} ended with status {status}; {log} ends with\n  {last}"
        )


def summary_of(run: Run, workdir: pathlib.Path) -> dict[str, Any]:
    """Reads the summary of a finished run, all that most tables need of it."""
    del run
    return {"summary": report.read_summary(workdir)}


def write(result: Mapping[str, Any], markdown: str, out: pathlib.Path) -> None:
    """Writes a table's record to its file, and prints its Markdown."""
    report.write(out, result)
    report.show(markdown)
    page = "; python -m scripts.make_tables puts it into its page"
    has_page = out.with_suffix(".md").is_file()
    process.progress(f"report: {out}{page if has_page else ''}")


def _all(machines: Sequence[Mapping[str, Any]], name: str) -> Any:
    """Returns what machines have of that name; text if they differ."""
    found = list(dict.fromkeys(machine.get(name, "?") for machine in machines))
    return found[0] if len(found) == 1 else " or ".join(map(str, found))


def identity(run: Run) -> str:
    """Returns a digest of all that a run's figures depend on, but for the code."""
    hashed = hashlib.sha256()
    for argument in run.arguments:
        flag, _, value = argument.partition("=")
        if flag == "--flagfile":  # of which comments do not count
            hashed.update(json.dumps(settings(pathlib.Path(value))).encode())
    parts = [run.module, *run.arguments, hashed.hexdigest()[:16]]
    if run.after is not None:
        parts.append(identity(run.after))
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def settings(flagfile: pathlib.Path) -> dict[str, str]:
    """Reads a flagfile: flag -> value, `true` where it has none."""
    lines = [line.strip() for line in flagfile.read_text().splitlines()]
    parts = [
        line.removeprefix("--").partition("=") for line in lines if line[:2] == "--"
    ]
    return {flag: value if equals else "true" for flag, equals, value in parts}


def flagfile(name: str) -> pathlib.Path:
    """Returns a flagfile of this repository, relative to the working directory."""
    return pathlib.Path(os.path.relpath(config.FOLDER / "flags" / f"{name}.flags"))
