"""Processes that a test starts and waits for."""

import subprocess
import sys


def python(*arguments, **given):
    """Runs Python with these arguments to its end, whatever its status; `given` goes to
    `subprocess.run`, and what was printed is text unless it says otherwise."""
    given = {"capture_output": True, "text": True} | given
    return subprocess.run([sys.executable, *arguments], **given)
