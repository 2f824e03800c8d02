import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from nebula_jax import errors
from nebula_jax.runtime.records import report
from scripts.tables import runs as table_runs


def execute(run, workdir):
    """Leaves behind what a run would."""
    summary = {"commit": "abc123", "seconds": 1.0}
    (workdir / "summary.json").write_text(json.dumps(summary))


def test_a_run_that_was_stopped_goes_on_unless_it_is_another_or_of_other_code(tmp_path):
    """Its folder is as it was left, and its seconds are of both parts."""
    seen = []

    def begun(run, workdir, is_stopped):
        seen.append((run.name, sorted(path.name for path in workdir.glob("step*"))))
        (workdir / f"step{len(seen)}").touch()
        if is_stopped:
            raise KeyboardInterrupt
        execute(run, workdir)

    def runs(is_stopped=False):
        return table_runs.Runs(
            tmp_path, table_runs.summary_of, lambda *at: begun(*at, is_stopped)
        )

    one, other = (table_runs.Run(name, "m", (f"--name={name}",)) for name in "ab")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine").write_text("")
    with pytest.raises(errors.NebulaError, match="was not made by this script"):
        runs().result(one)
    (tmp_path / "run" / "mine").unlink()
    with pytest.raises(KeyboardInterrupt):
        runs(is_stopped=True).result(one)
    path = tmp_path / "run" / table_runs.UNDER_WAY
    about = json.loads(path.read_text())
    path.write_text(json.dumps(about | {"seconds": 100.0}))
    result = runs().result(one)
    assert 100.0 <= result["summary"]["seconds"] < 130.0
    assert not (tmp_path / "run").exists()
    assert runs().result(one) == result
    assert seen == [("a", []), ("a", ["step1"])]

    (tmp_path / "results" / "a.json").unlink()
    for is_other in (True, False):
        with pytest.raises(KeyboardInterrupt):
            runs(is_stopped=True).result(one)
        if not is_other:
            about = json.loads(path.read_text())
            about["run"][1] = "another commit"
            path.write_text(json.dumps(about))
        assert runs().result(other if is_other else one)["summary"]["seconds"] == 1.0
        assert seen[-1][1] == []


def test_a_table_goes_on_elsewhere_with_the_figures_of_runs_that_ended(tmp_path):
    def runs(name, execute):
        return table_runs.Runs(
            tmp_path / name, table_runs.summary_of, execute, results=tmp_path / "kept"
        )

    run = table_runs.Run("a", "m", ("--x=1",))
    result = runs("here", execute).result(run)
    assert (tmp_path / "kept" / "a.json").is_file()
    assert runs("there", None).result(run) == result
    assert not (tmp_path / "there").exists()


def test_a_record_has_the_machines_and_commits_of_its_runs_not_of_who_gathers(tmp_path):
    machines = iter(["EPYC", "Xeon"])

    def execute(run, workdir):
        cpu = next(machines)
        hardware = {"cpu": cpu, "cores": 2}
        summary = {"commit": f"{cpu}1, same2", "seconds": 1.5, "hardware": hardware}
        (workdir / "summary.json").write_text(json.dumps(summary))

    def runs():
        return table_runs.Runs(tmp_path, table_runs.summary_of, execute)

    for name in "ab":
        runs().result(table_runs.Run(name, "m", ()))
    elsewhere = runs()
    for name in "ab":
        elsewhere.result(table_runs.Run(name, "m", ()))
    about = elsewhere.provenance(seeds=("0",))
    assert about["hardware"] == {"cpu": "EPYC or Xeon", "cores": 2}
    assert about["commit"] == "EPYC1, Xeon1, same2"
    assert (about["seconds"], about["seeds"]) == (3.0, ["0"])
    assert set(runs().provenance()["hardware"]) > {"cpu", "cores"}  # of this machine


def test_the_command_of_a_record_does_all_runs_anew(tmp_path, monkeypatch):
    runs = table_runs.Runs(tmp_path, table_runs.summary_of)
    for given in ("--results_dir=kept", "-results_dir kept", "--workdir=here"):
        command = f"python -m t {given} '--rows=a b'"
        monkeypatch.setattr(report, "command", lambda given=command: given)
        assert runs.provenance()["command"] == "python -m t '--rows=a b'"


def test_kept_figures_of_another_run_are_refused_with_what_differs(tmp_path):
    """Paths are arguments too: from elsewhere a run is another one."""

    def run(*arguments):
        return table_runs.Run("a", "m", arguments)

    flagfile = tmp_path / "x.flags"
    flagfile.write_text("--steps=1\n")
    given = f"--flagfile={flagfile}"
    runs = table_runs.Runs(tmp_path, table_runs.summary_of, execute)
    runs.result(run(given, "--seed=0", "--data_dir=../text"))
    for other, now in (
        (run(given, "--seed=0", "--data_dir=text"), "--data_dir=text"),
        (run(given, "--seed=0"), "none"),
    ):
        apart = f": --data_dir=../text, where now there is {now}. "
        with pytest.raises(errors.NebulaError, match=re.escape(apart)) as found:
            runs.result(other)
        assert "--seed" not in str(found.value)
        assert "in its working directory, with its --data_dir" in str(found.value)
    flagfile.write_text("--steps=2\n")
    with pytest.raises(errors.NebulaError, match="in a flagfile, or on what a run"):
        runs.result(run(given, "--seed=0", "--data_dir=../text"))


def test_a_failed_run_reports_the_last_lines_of_its_log(tmp_path):
    runs = table_runs.Runs(tmp_path, table_runs.summary_of)
    words = r"(?s)ended with status 1; .*No module named nebula_jax\.no_such_module"
    with pytest.raises(errors.NebulaError, match=words):
        runs.result(table_runs.Run("x", "nebula_jax.no_such_module", ()))


def test_a_flagfile_is_read_as_settings(tmp_path):
    path = tmp_path / "a.flags"
    path.write_text("# one\n--steps=3\n\n--truncate\n--forward_codec=a=b\n")
    want = {"steps": "3", "truncate": "true", "forward_codec": "a=b"}
    assert table_runs.settings(path) == want
    run = table_runs.Run("a", "m", (f"--flagfile={path}",))
    before = table_runs.identity(run)
    path.write_text(path.read_text() + "# a comment changes nothing\n")
    assert table_runs.identity(run) == before


def test_a_table_that_is_ended_leaves_no_run_behind(tmp_path):
    (tmp_path / "sleeper.py").write_text(
        "import os, pathlib, time\n"
        f"with pathlib.Path({str(tmp_path)!r}, 'new').open('w') as file:\n"
        "    file.write(str(os.getpid()))\n"
        f"os.rename({str(tmp_path / 'new')!r}, {str(tmp_path / 'pid')!r})\n"
        "time.sleep(300)\n"
    )
    table = (
        "import pathlib, sys\n"
        "from scripts.tables import runs\n"
        "runs.start(runs.Run('a', 'sleeper', ()), pathlib.Path(sys.argv[1]))\n"
    )
    root = pathlib.Path(table_runs.__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{tmp_path}"}
    command = [sys.executable, "-c", table, str(tmp_path)]
    with subprocess.Popen(command, env=environment) as process:
        while not (tmp_path / "pid").exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.terminate()
        assert process.wait(30) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
