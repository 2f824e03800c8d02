"""scripts/run, against a folder with its own tiny requirements."""

import os
import pathlib
import shutil
import stat
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "run"
CHOICES = ("NEBULA_VENV", "PYTHON")


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
    # An environment that these tests run in must not be the one that they make.
    inherited = {name: os.environ[name] for name in os.environ if name not in CHOICES}
    return subprocess.run(
        [root / "scripts" / "run", *command],
        capture_output=True,
        text=True,
        env=inherited | environment,
        cwd="/",
    )


def program(folder, name, text):
    """An executable that stands for another."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.mark.parametrize("chosen", ["", "python3"])
def test_an_old_python_is_named(chosen, project, tmp_path):
    old = program(tmp_path / "old", "python3", 'echo "Python 3.8.1"; exit 1')
    for name in ("python3.11", "python3.12", "python3.13"):
        program(tmp_path / "old", name, "exit 1")
    path = f"{old.parent}:/usr/bin:/bin"
    done = run(project, "true", PATH=path, PYTHON=chosen, PYENV_ROOT=str(tmp_path))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "Python 3.11 or newer is needed, but python3 is Python 3.8.1" in line


def stand_in(folder, name, status="0"):
    """A program that starts as a Python, whose environments say what made them; it
    answers questions about itself with a status, and installs nothing."""
    made = """for last; do true; done
case "$*" in
  *"-m venv"*)
    rm -rf "$last"; mkdir -p "$last/bin"; cp "$0" "$last/bin/python"
    echo "$last" > "$last/bin/activate"; cp "$0" "$last/made-by";;
esac
"""
    return program(
        folder,
        name,
        f"# {folder.parent.name} {name}\n[ $1 != -c ] || exit {status}\n{made}",
    )


def made_by(root):
    """The Python of a project's environment."""
    return (root / ".venv" / "made-by").read_text().splitlines()[1].split()


@pytest.mark.parametrize(
    ("there", "taken"),
    [
        ({"python3.13": "0", "python3.11": "0"}, "python3.13"),
        # A shim of pyenv: it is there and does not start.
        ({"python3.13": "127", "python3.12": "127", "python3.11": "0"}, "python3.11"),
        # Debian's without python3-venv comes after one that has what it takes.
        ({"python3.13": "3", "python3.12": "0"}, "python3.12"),
        ({"python3.13": "127", "python3.12": "127", "python3.11": "3"}, "python3.11"),
    ],
)
def test_the_newest_python_that_starts_is_taken(there, taken, project, tmp_path):
    for name in ("python3", "python3.11", "python3.12", "python3.13"):
        stand_in(tmp_path / "path" / "bin", name, there.get(name, "127"))
    path = f"{tmp_path / 'path' / 'bin'}:/usr/bin:/bin"
    done = run(project, "true", PATH=path, PYTHON="", PYENV_ROOT=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert made_by(project) == ["#", "path", taken]


def test_pyenvs_own_folders_are_looked_into(project, tmp_path):
    versions = tmp_path / "versions"
    for version in ("3.13.9", "3.13.10", "3.14.0", "3.12.1"):
        stand_in(versions / version / "bin", f"python{version[:4]}")
    stand_in(tmp_path / "path" / "bin", "python3.13", "127")
    path = f"{tmp_path / 'path' / 'bin'}:/usr/bin:/bin"
    done = run(project, "true", PATH=path, PYTHON="", PYENV_ROOT=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert made_by(project) == ["#", "3.13.10", "python3.13"]


def test_the_program_that_builds_it_is_a_pinned_one(project, tmp_path):
    """In an environment of its own, pip would build with the newest that there is."""
    python, asked = stand_in(tmp_path / "bin", "python3"), tmp_path / "asked"
    first, rest = python.read_text().split("\n", 1)
    python.write_text(f'{first}\necho "$*" >> "{asked}"\n{rest}')
    assert run(project, "true", PYTHON=str(python)).returncode == 0
    (built,) = (each for each in asked.read_text().splitlines() if "--editable" in each)
    assert "--no-build-isolation" in built
    assert "\nhatchling==" in (SCRIPT.parents[1] / "requirements.txt").read_text()


def test_an_update_leaves_what_the_user_installed(project, tmp_path):
    python = stand_in(tmp_path / "first" / "bin", "python3")
    assert run(project, "true", PYTHON=str(python)).returncode == 0
    own = project / ".venv" / "the user's own"
    own.touch()
    (project / "requirements.txt").write_text("# another\n")
    for environment in ({"PYTHON": ""}, {"PYTHON": str(python)}):
        done = run(project, "true", **environment)
        assert done.returncode == 0, done.stderr
        assert own.exists()
    assert "up to date" not in done.stderr  # the second time nothing is left to do


@pytest.mark.parametrize("change", ["moved", "gone", "another"])
def test_an_environment_whose_python_is_gone_or_another_is_made_anew(
    change, project, tmp_path
):
    python = stand_in(tmp_path / "first" / "bin", "python3")
    assert run(project, "true", PYTHON=str(python)).returncode == 0
    (project / ".venv" / "the user's own").touch()
    if change == "moved":
        project = project.rename(tmp_path / "elsewhere")
    elif change == "gone":
        (project / ".venv" / "bin" / "python").unlink()
    else:
        python = stand_in(tmp_path / "second" / "bin", "python3")
        python.write_text(
            python.read_text().replace("|| exit 0", "|| { echo 3.12; exit 0; }")
        )
    done = run(project, "true", PYTHON=str(python))
    assert done.returncode == 0, done.stderr
    assert not (project / ".venv" / "the user's own").exists()


def test_a_folder_that_is_no_environment_is_left_as_it_is(project, tmp_path):
    python = stand_in(tmp_path / "first" / "bin", "python3")
    own = tmp_path / "papers" / "thesis"
    own.parent.mkdir()
    own.touch()
    done = run(project, "true", PYTHON=str(python), NEBULA_VENV=str(own.parent))
    assert done.returncode == 1
    assert "papers is no environment of scripts/run" in done.stderr
    assert own.exists()


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
    wanted = (0, "ours: -c two words\n", "")
    assert (done.returncode, done.stdout, done.stderr) == wanted


@pytest.mark.parametrize("own", ["", "glibc.malloc.arena_max=2"])
def test_malloc_is_told_of_huge_pages_unless_told_otherwise(project, own):
    make_ready(project, "")
    environment = {"GLIBC_TUNABLES": own}
    done = run(project, "printenv", "GLIBC_TUNABLES", **environment)
    assert done.stdout.strip() == (own or "glibc.malloc.hugetlb=1"), done.stderr
    assert run(project).stderr.startswith("usage: scripts/run CMD")
