import errno
import io
import sys

import pytest

from nebula_jax.runtime.life import screen


class Broken(io.StringIO):
    """A stream that takes nothing, of a terminal or a file."""

    def __init__(self, error, is_terminal):
        super().__init__()
        self._error, self._is_terminal = error, is_terminal

    def isatty(self):
        return self._is_terminal

    def write(self, text):
        raise self._error


def test_elsewhere_than_on_a_terminal_lines_are_plain(capsys):
    with screen.Screen(["source", "target"]) as shown:
        shown.progress("source", "source  step 1")
        shown.message("target", "going on")
        shown.message("", "all clusters start again")
    out, err = capsys.readouterr()
    assert out == "source  step 1\n"
    assert err == "[target] going on\nall clusters start again\n"


@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, "a terminal that hung up"),
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
