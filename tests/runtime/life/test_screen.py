import errno
import io
import sys

import clocks
import pytest

from nebula_jax.runtime.life import process, screen


class Terminal(io.StringIO):
    """A stream that is shown."""

    def isatty(self):
        return True


class Broken(io.StringIO):
    """A stream that takes nothing, of a terminal or a file."""

    def __init__(self, error, is_terminal):
        super().__init__()
        self._error, self._is_terminal = error, is_terminal

    def isatty(self):
        return self._is_terminal

    def write(self, text):
        raise self._error


def test_the_launcher_has_the_last_word(monkeypatch):
    """A cluster's newest line, which had to wait, comes before the error."""
    written = io.StringIO()
    monkeypatch.setattr(sys, "stdout", written)
    monkeypatch.setattr(sys, "stderr", written)
    with screen.Screen(["a"]) as shown:
        for step in (1, 2):
            shown.progress("a", f"a step {step}")
        shown.message("", "error: a has failed")
    assert written.getvalue() == "a step 1\na step 2\nerror: a has failed\n"


@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "a full disk"),
        BrokenPipeError(errno.EPIPE, "a reader that has gone"),
    ],
)
def test_a_run_goes_on_without_its_screen(monkeypatch, error, is_terminal):
    monkeypatch.setattr(sys, "stdout", Broken(error, is_terminal))
    monkeypatch.setattr(sys, "stderr", Broken(error, is_terminal))
    with screen.Screen(["source", "target"]) as shown:
        shown.progress("source", "source  step 1")
        shown.message("target", "going on")


def test_elsewhere_few_lines_of_a_cluster_are_shown_and_its_last(capsys):
    clock = clocks.Clock(0.0)
    with screen.Screen(["source", "target"], clock) as shown:
        for step in range(100):
            clock.now = float(step)
            shown.progress("source", f"source  step {step}")
        shown.progress("target", "target  step 7")
        shown.output("what a script prints itself")
        shown.output("comes at once, all of it")
    assert capsys.readouterr().out.splitlines() == [
        *(f"source  step {step}" for step in (0, 30, 60, 90)),
        "target  step 7",
        "what a script prints itself",
        "comes at once, all of it",
        "source  step 99",
    ]


def test_a_line_that_had_to_wait_is_shown_when_it_is_time(capsys):
    clock = clocks.Clock(0.0)
    with screen.Screen(["source"], clock) as shown:
        shown.progress("source", "source  preparing")
        shown.progress("source", "source  waiting for target")
        shown.tick()
        assert capsys.readouterr().out == "source  preparing\n"
        clock.now = screen.QUIET_SECONDS
        shown.tick()
        assert capsys.readouterr().out == "source  waiting for target\n"
        shown.progress("source", "source  step 1")  # the first one waits for nothing
        assert capsys.readouterr().out == "source  step 1\n"
    assert capsys.readouterr().out == ""


def test_a_program_gets_every_line(monkeypatch, capsys):
    monkeypatch.setattr(process, "_log_format", ["json"])
    with screen.Screen(["source"]) as shown:
        for step in range(3):
            shown.progress("source", f'{{"step": {step}}}')
    assert capsys.readouterr().out.splitlines() == [
        f'{{"step": {step}}}' for step in range(3)
    ]


def test_on_a_terminal_a_line_that_stays_has_its_age(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Terminal())
    clock = clocks.Clock(0.0)
    shown = screen.Screen(["source", "target"], clock)
    assert shown._all().plain.splitlines() == [
        "source        importing",
        "target        importing",
    ]
    clock.now = 12.0
    shown.progress("target", "target  step 1")
    assert shown._all().plain.splitlines() == [
        "source        importing  (12 s)",
        "target  step 1",
    ]


@pytest.mark.parametrize("is_launched", [True, False])
def test_a_process_alone_is_quiet_unless_a_launcher_reads_it(
    monkeypatch, capsys, is_launched
):
    if is_launched:
        monkeypatch.setenv(process.LIFELINE_FD, "0")
    lines = screen.own_lines()
    for step in range(3):
        lines.add("a", process.formatted(f"step {step}"))
    lines.flush()
    mark = process.PROGRESS_MARK
    wanted = (
        [f"{mark}step {n}" for n in range(3)] if is_launched else ["step 0", "step 2"]
    )
    assert capsys.readouterr().out.split("\n")[:-1] == wanted
