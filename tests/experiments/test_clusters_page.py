"""The page "from a laptop to two real clusters": its commands, run as they stand."""

import os
import pathlib
import shlex
import signal
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / "experiments" / "clusters.md"
SECONDS = 600.0


def commands():
    """The page's commands, in their order."""
    lines = PAGE.read_text().splitlines()
    return [line.strip() for line in lines if line.startswith("    ")]


def test_it_has_a_command_for_every_process_of_both_clusters():
    found = [dict(each.partition("=")[::2] for each in shlex.split(line))
             for line in commands()]  # fmt: skip
    clusters = [each["--cluster"] for each in found if "--cluster" in each]
    assert clusters == ["discriminator", "discriminator", "generator:0"]
    assert len(found) == 7


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
