"""The page "from a laptop to two real clusters": its commands, run as they stand."""

import os
import pathlib
import signal
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / "experiments" / "clusters.md"
SECONDS = 600.0


def commands():
    lines = PAGE.read_text().splitlines()
    return [line.strip() for line in lines if line.startswith("    ")]


@pytest.mark.slow
def test_its_commands_run_as_they_stand(tmp_path):
    """In an empty folder that looks like a checkout; `&` is another terminal."""
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    run = tmp_path / "scripts" / "run"
    run.parent.mkdir()
    run.write_text(f'#!/bin/sh\nexec {ROOT}/scripts/run "$@"\n')
    run.chmod(0o755)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    waiting = []
    try:
        for line in commands():
            process = subprocess.Popen(
                ["bash", "-c", line.removesuffix("&").strip()],
                cwd=tmp_path,
                env=environment,
                start_new_session=True,
            )
            if line.endswith("&"):
                waiting.append(process)
            else:
                assert process.wait(SECONDS) == 0, line
        assert [each.wait(SECONDS) for each in waiting] == [0, 0]
    finally:
        for each in waiting:
            if each.poll() is None:
                os.killpg(each.pid, signal.SIGKILL)
    assert (tmp_path / "runs/laptop/trace.json").is_file()
    assert (tmp_path / "runs/here/discriminator/encoder").is_dir()
