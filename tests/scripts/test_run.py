"""scripts/run, against a folder with its own tiny requirements."""

import os
import pathlib
import shutil
import stat
import subprocess

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "run"


def new_project(folder):
    """A project that needs nothing from any registry, not yet made ready."""
    root = folder / "a project"
    (root / "scripts").mkdir(parents=True)
    shutil.copy(SCRIPT, root / "scripts" / "run")
    (root / "requirements.txt").write_text("# nothing\n")
    (root / "setup.cfg").write_text("[metadata]\nname = tiny\nversion = 1\n")
    (root / "pyproject.toml").write_text("")
    return root


@pytest.fixture
def project(tmp_path):
    return new_project(tmp_path)


@pytest.fixture(scope="module")
def ready(tmp_path_factory):
    """A project for several tests; the first command makes its environment."""
    return new_project(tmp_path_factory.mktemp("ready"))


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


def test_an_unreachable_registry_is_said(project, ready, tmp_path):
    run(ready, "true")
    # Its environment is a copy: `python -m venv` takes as long as all else.
    copy = f'[ "$1" = -c ] || cp -r "{ready}/.venv" "{project}/.venv"'
    python = program(tmp_path / "copies", "python3", copy)
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
    python = program(project / ".venv" / "bin", "python", 'echo "ours: $@"')
    files = ("requirements.txt", "setup.cfg", "pyproject.toml")
    content = b"".join((project / name).read_bytes() for name in files)
    digest = subprocess.run(["cksum"], input=content, capture_output=True).stdout
    stamp = python.parents[1] / "nebula.stamp"
    stamp.write_text(f"{digest.decode().strip()} {project}\n")
    done = run(project, "python", "-c", "two words")
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        "ours: -c two words\n",
        "",
    )


@pytest.mark.parametrize("own", ["", "glibc.malloc.arena_max=2"])
def test_malloc_is_told_of_huge_pages_unless_told_otherwise(ready, own):
    environment = {"GLIBC_TUNABLES": own}
    done = run(ready, "printenv", "GLIBC_TUNABLES", **environment)
    assert done.stdout.strip() == (own or "glibc.malloc.hugetlb=1"), done.stderr
