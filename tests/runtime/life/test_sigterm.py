"""SIGTERM: a command that gets it leaves neither processes nor folders."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import children
import pytest

ROOT = pathlib.Path(__file__).parents[3]
SOON = 60.0  # seconds
PYTHON = f"""#!{sys.executable}
# In place of Python: a command of `nebula` ends, all else goes on until it is ended.
import os, pathlib, signal, sys, time
print("line to lab-t", flush=True)
command = " ".join(sys.argv)
if "scripts.nebula" in command and "nebula switch" not in command:
    sys.exit()

def end(number, frame):
    time.sleep(0.5)  # a run saves
    for each in sys.argv:
        if each.startswith("--workdir="):
            pathlib.Path(each.removeprefix("--workdir="), "saved").mkdir(parents=True)
    os._exit(0)

for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, end)
pathlib.Path(os.environ["STARTED"], str(os.getpid())).touch()
while True:
    time.sleep(1.0)
"""
SECURITY = "from scripts import bench_security as command"
KILLS = """
from scripts import bench_faults as command
command.cuts = lambda rounds, draw: []
"""
COMMAND = """
import os, pathlib, signal, sys
from absl import flags
{}
flags.FLAGS(sys.argv)
sys.executable = os.environ["PYTHON"]
sys.exit(command.main())
"""


@pytest.mark.parametrize(
    ("command", "processes"), [(SECURITY, 4), (KILLS, 1)], ids=["exchange", "kills"]
)
def test_what_a_command_has_started_ends_with_it(tmp_path, command, processes):
    started, temporary = tmp_path / "started", tmp_path / "temporary"
    for folder in (started, temporary):
        folder.mkdir()
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o700)
    given = {"STARTED": started, "TMPDIR": temporary, "PYTHON": python}
    environment = os.environ | {name: str(path) for name, path in given.items()}
    arguments = [f"--workdir={tmp_path / 'run'}", f"--out={tmp_path / 'out.json'}"]
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND.format(command), *arguments],
        cwd=ROOT,
        env=environment,
    ) as process:
        deadline = time.monotonic() + SOON
        while len(list(started.iterdir())) < processes:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.terminate()
        try:
            status = process.wait(SOON)
        finally:
            process.kill()
    left = [each.name for each in started.iterdir() if is_running(int(each.name))]
    for each in left:
        os.kill(int(each), signal.SIGKILL)
    assert not left
    assert list(temporary.iterdir()) == []
    assert status == 128 + signal.SIGTERM


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_second_request_does_not_cut_short_what_the_first_began():
    program = (
        "import os, signal\n"
        "from nebula_jax.runtime.life import process\n"
        "with process.sigterm_as_exit():\n"
        "    try:\n"
        "        signal.raise_signal(signal.SIGTERM)\n"
        "    finally:\n"
        "        signal.raise_signal(signal.SIGTERM)\n"
        "        print('ended', flush=True)\n"
    )
    done = children.python("-c", program, cwd=ROOT)
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, "ended\n")
