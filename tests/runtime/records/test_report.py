import importlib.machinery
import io
import json
import os
import subprocess
import sys
import types

import numpy as np
import pytest

from nebula_jax import installed
from nebula_jax.runtime.records import report


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A git repository that `commit` takes for ours."""
    (tmp_path / "experiments" / "results").mkdir(parents=True)
    code = tmp_path / "nebula_jax" / "runtime" / "records" / "report.py"
    code.parent.mkdir(parents=True)
    code.write_text("")
    monkeypatch.setattr(installed, "FOLDER", tmp_path)

    def git(*arguments):
        who = ("-c", "user.name=n", "-c", "user.email=n@example.org")
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True)

    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message=all")
    return tmp_path


def test_a_commit_is_marked_if_a_file_is_changed_or_new(checkout):
    clean = report.commit()
    assert len(clean) == 12
    (checkout / "experiments" / "results" / "table.json").write_text("{}")
    assert report.commit() == clean  # results of other runs do not count
    (checkout / "more.py").write_text("")
    assert report.commit() == clean + "+"
    (checkout / "more.py").unlink()
    (checkout / "nebula_jax" / "runtime" / "records" / "report.py").write_text(
        "changed"
    )
    assert report.commit() == clean + "+"


def test_a_folder_without_a_repository_has_an_unknown_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(installed, "FOLDER", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert report.commit() == "unknown"


def test_provenance_has_command_commits_hardware_time_and_seeds():
    found = report.provenance(1.26, commits=["b", "a", "b"], seeds=["0", "7"])
    assert list(found) == ["command", "commit", "hardware", "seconds", "seeds"]
    assert found["command"].startswith("python ")
    assert found["commit"] == "b, a"
    assert found["seconds"] == 1.3
    assert found["seeds"] == ["0", "7"]
    assert {"cpu", "cores", "devices", "python", "jax"} == found["hardware"].keys()
    alone = report.provenance(1.0)
    assert alone["commit"] == report.commit()
    assert "seeds" not in alone


@pytest.mark.parametrize("module", ["scripts.plan", "tests.simulation.__main__"])
def test_the_command_is_what_a_person_types(module, monkeypatch):
    main = types.ModuleType("__main__")
    main.__spec__ = importlib.machinery.ModuleSpec(module, None)
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "argv", ["path", "--rows=a b"])
    typed = module.removesuffix(".__main__")
    assert report.command() == f"python -m {typed} '--rows=a b'"


def test_a_record_is_written_whole_and_read_back(tmp_path):
    report.write(tmp_path / "summary.json", {"what": "ε"})
    assert report.read_summary(tmp_path) == {"what": "ε"}
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
    with pytest.raises(TypeError):
        report.write(tmp_path / "summary.json", {"what": object()})
    assert report.read_summary(tmp_path) == {"what": "ε"}
    assert report.read_summary(tmp_path / "none") == {}


def test_a_summary_is_stale_if_a_cluster_has_a_newer_one(tmp_path):
    path, cluster = tmp_path / "summary.json", tmp_path / "a"
    cluster.mkdir()
    assert report.is_stale(path, [cluster])
    path.write_text("{}")
    assert not report.is_stale(path, [cluster])
    (cluster / "summary.json").write_text("{}")
    os.utime(cluster / "summary.json", (1, 1))
    assert not report.is_stale(path, [cluster])
    os.utime(path, (0, 0))
    assert report.is_stale(path, [cluster])


def test_the_seconds_are_those_of_the_command_that_trained():
    trained = [{"seconds": 7200.0}, {}, {"seconds": 7100.0}]
    assert report.wall_seconds(9.0, trained) == 7200.0  # an earlier one did
    assert report.wall_seconds(7300.0, trained) == 7300.0
    assert report.wall_seconds(9.0, []) == 9.0


SUMMARY = {
    "clusters": [
        {
            "cluster": "source",
            "first_step": 1,
            "last_step": 10,
            "tokens_per_second": 1234.5,
            "bytes_sent": 1_000_000,
            "bytes_received": 2_500,
            "waited_seconds": 1.0,
            "seconds": 4.0,
        }
    ],
    "losses": {"source": {"first": 4.0, "last": 2.05}},
}


def test_a_cluster_has_a_row_with_its_steps_loss_speed_bytes_and_waiting():
    row = "| source | 10 | 4.000 → 2.050 | 1,234 | 1.0 MB | 2.5 kB | 25% |"
    assert row in report.clusters(SUMMARY)
    resumed = json.loads(json.dumps(SUMMARY))
    resumed["clusters"][0]["first_step"] = 6
    assert "resumed" not in report.clusters(SUMMARY)
    assert "all other figures where it was resumed" in report.clusters(resumed)
    for losses in ({}, {"first": 0.0, "last": 0.0}):  # it has no loss of its own
        resumed["losses"]["source"] = losses
        assert "| source | 6-10 | – | 1,234 |" in report.clusters(resumed)


def test_clusters_without_figures_of_the_runs_end_are_named():
    assert report.missing(SUMMARY) == ""
    more = json.loads(json.dumps(SUMMARY))
    more["losses"] |= {"target": {}, "third": {}}
    more["clusters"].append(SUMMARY["clusters"][0] | {"cluster": "third"})
    more["clusters"][1]["last_step"] = 6  # of an earlier stop
    assert "at step 10, were written by target, third:" in report.missing(more)
    assert report.missing(more | {"clusters": []}) == ""


def test_a_figure_that_was_not_finite_is_null_and_shown_as_nothing(tmp_path):
    path = tmp_path / "summary.json"
    report.write(path, SUMMARY | {"losses": {"source": {"first": 4.0, "last": np.nan}}})
    json.loads(path.read_text(), parse_constant=pytest.fail)
    assert "| 4.000 → – |" in report.clusters(report.read_summary(tmp_path))


class Terminal(io.StringIO):
    """A terminal that keeps what it is sent."""

    def isatty(self):
        return True


def test_a_terminal_shows_the_markdown_that_a_pipe_gets_as_it_is(monkeypatch, capsys):
    table = report.clusters(SUMMARY)
    markdown = report.join("    a command", "**Ten** steps.", table)
    report.show(markdown)
    assert capsys.readouterr().out == markdown
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    report.show(markdown)
    shown = terminal.getvalue()
    assert "|---" not in shown
    assert "**" not in shown
    assert "a command" in shown
    for cell in table.replace("-", "").replace(":", "").split("|"):
        assert cell.strip() in shown


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_report_that_nobody_reads_fails_no_run(monkeypatch, is_terminal, tmp_path):
    class Gone(io.StringIO):
        def isatty(self):
            return is_terminal

        def write(self, text):
            raise OSError("a disk that is full")

    monkeypatch.setattr(sys, "stdout", Gone())
    report.show("loss 2.1 → 1.9\n")
    report.print_paths(tmp_path)
