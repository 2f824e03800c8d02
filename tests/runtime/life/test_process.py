import errno
import io
import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from nebula_jax import errors, printable
from nebula_jax.communication import bridge, link
from nebula_jax.communication.wire import driver, session, stuck_peers
from nebula_jax.runtime import connect
from nebula_jax.runtime.connect import all_clusters
from nebula_jax.runtime.life import process
from nebula_jax.training import checkpoint


@pytest.fixture
def interrupt():
    """An installed one; signals are as they were afterwards."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    yield process.Interrupt().install()
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_a_request_while_there_is_something_to_save(
    interrupt, number, capsys
):
    interrupt.is_graceful = True
    assert not interrupt.requested()
    os.kill(os.getpid(), number)
    assert interrupt.requested()
    folder = pathlib.Path("runs/a")
    assert interrupt.exit_status("finetune", 3, 9, folder) == 128 + number
    name = signal.Signals(number).name
    message = f"finetune: stopped after step 3 by {name}, saved in runs/a; the same"
    assert capsys.readouterr().err == f"{message} command goes on with step 4\n"
    assert interrupt.exit_status("finetune", 9, 9) == 0


def test_a_second_signal_is_final_unless_it_comes_with_the_first(
    interrupt, monkeypatch, capsys
):
    ended = []
    monkeypatch.setattr(process.os, "kill", lambda pid, number: ended.append(number))
    interrupt.is_graceful = True
    monkeypatch.setattr(process, "TWICE_SECONDS", 60.0)
    for _ in range(3):  # as `timeout` sends them
        signal.raise_signal(signal.SIGINT)
    assert (ended, interrupt.number) == ([], signal.SIGINT)
    monkeypatch.setattr(process, "TWICE_SECONDS", 0.0)
    signal.raise_signal(signal.SIGTERM)
    assert ended == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert "ends at once" in capsys.readouterr().err


def test_who_stops_for_a_peer_has_a_status_of_its_own(capsys):
    status = process.Interrupt().exit_status("finetune", 3, 9)
    assert status == process.STOPPED_BY_PEER
    assert "stopped after step 3 by another cluster; " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (errors.SettingsError("--steps=x: no"), 2, "error: --steps=x: no"),
        (errors.NebulaError("no text"), 1, "error: no text"),
        (OSError("disk full"), 1, "error: disk full"),
        (session.PeerGone("gone"), process.ENDED_BY_PEER, "error: gone"),
        (stuck_peers.PeerStuck("stuck"), process.ENDED_BY_PEER, "error: stuck"),
        (session.PeerAborted("bad"), process.ENDED_BY_PEER, "error: bad"),
        (bridge.NobodyThere("nobody"), process.ENDED_BY_PEER, "error: nobody"),
        (link.Timeout("no Hello"), process.ENDED_BY_PEER, "error: no Hello"),
        # Refusals: they come again, so nobody shall start such a process again.
        (bridge.ConnectError("no TLS"), 1, "error: no TLS"),
        (bridge.Mismatch("--steps"), 1, "error: --steps"),
        (session.RemoteProtocolError("flood"), 1, "error: flood"),
        (checkpoint.CheckpointError("another run"), 1, "error: another run"),
        # A failure of this process, which no line can mend.
        (driver.LineFailed("MemoryError"), 1, "error: MemoryError"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (process.Stopped("a: stopped", signal.SIGTERM), 143, "a: stopped"),
    ],
)
def test_an_error_is_one_line_and_a_status(capsys, error, status, line):
    def main():
        raise error

    assert process.guarded(main) == status
    assert capsys.readouterr().err == line + "\n"
    assert process.guarded(lambda: 7) == 7


class Broken(io.StringIO):
    """A stream that takes nothing."""

    def __init__(self, error):
        super().__init__()
        self._error = error

    def write(self, text):
        raise self._error


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "a full disk"),
        BrokenPipeError(errno.EPIPE, "a reader that has gone"),
        ValueError("a closed file"),
    ],
)
@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_run_goes_on_if_nobody_can_read_what_it_does(monkeypatch, name, error):
    monkeypatch.setattr(sys, name, Broken(error))
    process.message("generator:0 is back")
    process.progress("generator:0  step 7")
    assert process.guarded(lambda: 0) == 0


@pytest.mark.parametrize(
    ("stream", "work", "status"),
    [
        ("stdout", "process.progress('step 7')", 4),
        ("stderr", "process.message('going on')", 4),
        ("stdout", "print('a translation')", 120),  # what a command is for is missed
    ],
)
def test_the_status_is_that_of_the_run_though_nobody_reads_it(stream, work, status):
    """By it a supervisor decides whether to start it again."""
    code = f"""if True:
        import sys
        from nebula_jax.runtime.life import process
        {work}
        process.drop_unread()
        sys.exit(4)"""
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | {stream: full},
        )
    assert done.returncode == status, done


def test_what_an_encoding_lacks_is_replaced_and_changes_no_status():
    """A run of hours has ended well by then; `translate` writes UTF-8 by itself."""
    code = """if True:
        import sys
        from nebula_jax.runtime.life import process
        from nebula_jax.runtime.records import report
        def main():
            report.show("loss 2.1 → 1.9\\n")
            process.progress("step → 7")
            process.message("step → 7")
            print("→")
            return 0
        sys.exit(process.guarded(main))"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
        capture_output=True,
    )
    assert (done.returncode, done.stderr) == (0, b"step \\u2192 7\n"), done
    assert done.stdout == b"loss 2.1 ? 1.9\nstep ? 7\n?\n"


def test_for_a_program_each_line_is_an_object(monkeypatch, capsys):
    monkeypatch.setattr(process, "_log_format", ["text"])
    assert not process.is_json()
    process.log_as("json")
    process.progress("step 7", {"step": 7, "loss": float("nan")})
    process.progress("report: a.json")
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {"step": 7, "loss": None},
        {"text": "report: a.json"},
    ]


@pytest.mark.parametrize("value", ["", "²", "-1", "999999", "9" * 5000])
def test_rubbish_in_the_environment_is_named(monkeypatch, value):
    monkeypatch.setenv(process.LIFELINE_FD, value)
    with pytest.raises(errors.SettingsError, match=process.LIFELINE_FD):
        process.Interrupt().install()
    monkeypatch.setenv(connect.LISTEN_FD, value)
    with pytest.raises(errors.SettingsError, match=connect.LISTEN_FD):
        all_clusters.check_place(connect.Settings(), "d", ["d", "g"])
    with pytest.raises(errors.SettingsError, match=connect.LISTEN_FD):
        connect.listening_socket(connect.Settings())


def test_a_descriptor_of_another_kind_is_refused(monkeypatch):
    ends = os.pipe()
    monkeypatch.setenv(connect.LISTEN_FD, str(ends[0]))
    with open(os.devnull) as nothing:
        monkeypatch.setenv(process.LIFELINE_FD, str(nothing.fileno()))
        with pytest.raises(errors.SettingsError, match=process.LIFELINE_FD):
            process.Interrupt().install()
    with pytest.raises(errors.SettingsError, match=connect.LISTEN_FD):
        connect.listening_socket(connect.Settings())
    for end in ends:
        os.close(end)


def test_a_message_does_nothing_to_the_terminal(capsys):
    process.message("one\n  ^\x1b[2J\u202e" + 60_000 * "x")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "one"
    assert lines[1].startswith("  ^\ufffd[2J\ufffdxxx")
    assert len(lines[1]) == printable.LINE_LIMIT
