"""The page of a run in a terminal, as text."""

import io
import sys
import time

import rich.console

from nebula_jax.runtime.records import report
from nebula_jax.training import metrics
from scripts import top

RECORD = {
    "loss": 2.5,
    "tokens_per_second": 1943.0,
    "steps_per_second": 2.0,
    "steps_left": 60,
    "seconds_left": 30.0,
    "sent_mbit": 12.0,
    "received_mbit": 0.1,
    "waiting_share": 0.41,
    "waiting_for": {"generator:0": 0.1, "generator:1": 0.31},
    "round_trip": {"generator:0": 0.03},
}


def log(folder, **more):
    made = metrics.MetricsLog(folder, 0, print)
    made.write(20, {"steps_per_second": 1.0})
    made.write(40, RECORD | more)
    made.write(40, {"held_out_auc": {"en": 0.5}})
    made.close()


def shown(workdir, now):
    console = rich.console.Console(width=200, file=io.StringIO())
    console.print(top.table(workdir, now))
    lines = console.file.getvalue().splitlines()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]
    return {row[0]: row[1:] for row in rows if row}


def test_each_cluster_has_a_row_and_those_elsewhere_too(tmp_path):
    log(tmp_path / "discriminator")
    log(tmp_path / "generator-0", waiting_for={"discriminator": 0.0})
    found = shown(tmp_path, time.time() + 7)
    assert found["discriminator"] == [
        *("40", "40%", "30 s", "loss 2.5000", "1,943 tokens/s", "12.0", "0.1", "30 ms"),
        *("41% for generator:1", "7 s ago"),
    ]
    assert found["generator:0"][8] == "41%"  # its folder's name is another
    assert found["generator:1"][-1] == "elsewhere"
    assert set(found) == {"discriminator", "generator:0", "generator:1"}


def test_a_cluster_may_have_taken_no_step_or_have_ended(tmp_path):
    metrics.MetricsLog(tmp_path / "a", 0, print).close()
    log(tmp_path / "b", steps_left=0, seconds_left=0.0, waiting_for={})
    log(tmp_path / "c")
    for name in "bc":
        about = {"cluster": name, "last_step": 40}
        report.write(tmp_path / name / "summary.json", about)
    found = shown(tmp_path, time.time())
    assert found["a"][-1] == "no step yet"
    assert found["b"][1:3] == ["100%", ""]
    assert found["b"][-1] == "done"
    assert found["c"][-1] == "stopped"


def test_into_a_pipe_the_page_is_printed_once(tmp_path, capsys):
    log(tmp_path / "discriminator")
    assert top.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("discriminator") == 1
    assert top.main([str(tmp_path / "x")]) == 2
    assert "x: no run is there" in capsys.readouterr().err


def test_on_a_terminal_it_lives_until_it_is_interrupted(tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    log(tmp_path / "discriminator")
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        if len(slept) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(top.time, "sleep", sleep)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert top.main([str(tmp_path), "--every=0.5"]) == 0
    assert slept == [0.5] * 3
