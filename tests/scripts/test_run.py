"""scripts/run, against a folder with its own tiny requirements."""

import os
import pathlib
import shutil
import stat
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "run"


@pytest.fixture
def project(tmp_path):
    """A project that needs nothing from any registry, not yet made ready."""
    root = tmp_path / "a project"
    (root / "scripts").mkdir(parents=True)
    shutil.copy(SCRIPT, root / "scripts" / "run")
    (root / "requirements.txt").write_text("# nothing\n")
    (root / "setup.cfg").write_text("[metadata]\nname = tiny\nversion = 1\n")
    (root / "pyproject.toml").write_text("")
    return root


def make_ready(root, python):
    """An environment with a program as its Python, as if it had been installed."""
    path = program(root / ".venv" / "bin", "python", python)
    files = ("requirements.txt", "setup.cfg", "pyproject.toml")
    content = b"".join((root / name).read_bytes() for name in files)
    digest = subprocess.run(["cksum"], input=content, capture_output=True).stdout
    (path.parents[1] / "nebula.stamp").write_text(f"{digest.decode().strip()} {root}\n")


def run(root, *command, **environment):
    return subprocess.run(
        [root / "scripts" / "run", *command],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        cwd="/",
    )


def program(folder, name, text):
    """An executable that stands for another."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_without_a_command_it_says_how_to_use_it(project):
    done = run(project)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: scripts/run CMD")


def test_an_old_python_is_named(project, tmp_path):
    old = program(tmp_path / "old", "python3", 'echo "Python 3.8.1"; exit 1')
    for name in ("python3.11", "python3.12", "python3.13"):
        program(tmp_path / "old", name, "exit 1")
    path = f"{old.parent}:/usr/bin:/bin"
    done = run(project, "true", PATH=path, PYTHON="python3")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "Python 3.11 or newer is needed, but python3 is Python 3.8.1" in line


def test_an_unreachable_registry_is_said(project, tmp_path):
    """With this Python's own pip: another environment needs as long as all else."""
    made = f'ln -s "{sys.executable}" "{project}/.venv/bin/python"'
    venv = f'[ "$1" = -c ] || {{ mkdir -p "{project}/.venv/bin"; {made}; }}'
    python = program(tmp_path / "links", "python3", venv)
    (project / "requirements.txt").write_text("no-such-package-here\n")
    done = run(
        project,
        "true",
        PYTHON=str(python),
        PIP_INDEX_URL="http://127.0.0.1:9/simple",
        PIP_EXTRA_INDEX_URL="",
        PIP_FIND_LINKS="",
        PIP_RETRIES="0",
        PIP_NO_CACHE_DIR="1",
        PIP_CONFIG_FILE="/dev/null",
    )
    assert done.returncode == 1
    assert "the package registry cannot be reached" in done.stderr.splitlines()[-1]


def test_it_runs_the_command_in_the_environment_quietly_when_nothing_changed(project):
    make_ready(project, 'echo "ours: $@"')
    done = run(project, "python", "-c", "two words")
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        "ours: -c two words\n",
        "",
    )


@pytest.mark.parametrize("own", ["", "glibc.malloc.arena_max=2"])
def test_malloc_is_told_of_huge_pages_unless_told_otherwise(project, own):
    make_ready(project, "")
    environment = {"GLIBC_TUNABLES": own}
    done = run(project, "printenv", "GLIBC_TUNABLES", **environment)
    assert done.stdout.strip() == (own or "glibc.malloc.hugetlb=1"), done.stderr
