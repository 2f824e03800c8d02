"""A test that hangs ends, and the others go on; a worker that dies ends the run."""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
TESTS = """
import threading

def test_that_waits_for_ever():
    threading.Lock().acquire() and threading.Event().wait()

def test_after_it():
    pass
"""


def test_a_test_that_hangs_fails_alone_and_shows_where(tmp_path):
    """With the project's own settings, but a shorter time."""
    (tmp_path / "test_hangs.py").write_text(TESTS)
    settings = f"--config-file={ROOT / 'setup.cfg'}", f"--rootdir={tmp_path}"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *settings, "-n", "0", "-o", "timeout=1", "."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "1 failed, 1 passed" in run.stdout, run.stdout + run.stderr
    assert "Timeout (>1.0s)" in run.stdout
    assert "threading.Event().wait()" in run.stdout


def test_a_worker_that_dies_is_named_and_the_run_ends(tmp_path):
    """With the project's own settings. Restarted workers would wait for ever."""
    dies = "import os\n\ndef test_that_dies():\n    os.kill(os.getpid(), 9)\n"
    (tmp_path / "test_dies.py").write_text(dies)
    (tmp_path / "test_lives.py").write_text("def test_that_lives():\n    pass\n")
    settings = f"--config-file={ROOT / 'setup.cfg'}", f"--rootdir={tmp_path}"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *settings, "-n", "2", "."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 1, run.stdout + run.stderr
    assert "crashed while running 'test_dies.py::test_that_dies'" in run.stdout


def test_every_test_has_a_limit(request):
    """Of a quarter of an hour, and of half an hour where it is slow."""
    assert float(request.config.getini("timeout")) == 900
    assert request.config.getini("timeout_method") == "signal"
    for item in request.session.items:
        if item.get_closest_marker("slow"):
            assert item.get_closest_marker("timeout")
