"""Processes that a test starts and waits for."""

import subprocess
import sys


def python(*arguments, **given):
    """Runs Python with these arguments to its end, whatever its status.

    Args:
      arguments: as on a command line.
      given: of `subprocess.run`; what was printed is text unless it says otherwise.
    """
    given = {"capture_output": True, "text": True} | given
    return subprocess.run([sys.executable, *arguments], **given)
