"""What `nebula.main` refuses: flags, names and roles of a script, in one line each."""

import contextlib
import sys

import children
import pytest
from absl import flags
from absl.testing import flagsaver

from nebula_jax import errors
from nebula_jax.commands import fields, roles
from nebula_jax.runtime.records import run_folder

SCRIPT = """
import sys
from absl import flags
import nebula_jax as nebula

flags.DEFINE_string("data", "", "Folder.")
TWO = {"front": print, "back": print}
CALLS = [
    (TWO, {"defaults": {"stepz": 3}}),
    (TWO, {"defaults": {"steps": "x"}}),
    (TWO, {"own_flags": ["dota"]}),
    ({"all": print, "b": print}, {}),
    ({"a/b": print, "b": print}, {}),
]
if __name__ == "__main__":
    for roles, more in CALLS:
        try:
            nebula.main(roles, **more)
        except SystemExit as end:
            print(end.code)
    sys.argv.append("--help")
    nebula.main(TWO)
"""
LINES = [
    "error: defaults={'stepz': 3}: ",
    "error: defaults={'steps': 'x'}: ",
    "error: own_flags=['dota']: the script",
    "error: roles={'all': ...}: ",
    "error: 'a/b' is no cluster's name",
]


def test_what_a_script_gives_wrongly_is_one_line_and_help_names_its_clusters(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    found = children.python(path, cwd=tmp_path)
    for line, words in zip(found.stderr.splitlines(), LINES, strict=True):
        assert line.startswith(words)
    *statuses, shown = found.stdout.split("\n", len(LINES))
    assert statuses == ["2"] * len(LINES)
    assert "front, back; or all" in " ".join(shown.split())
    assert "whole" not in shown


PROGRAM = """
from absl import flags
import nebula_jax as nebula

flags.DEFINE_integer("width", 3, "Columns.")

def train(run):
    print(run.cluster, "has width", run._hello(()).settings["--width"], flush=True)

def main():
    nebula.main({"a": train, "b": train}, defaults={"tls": "off"})
"""


def test_a_command_as_pip_installs_one_starts_all_clusters(tmp_path):
    """Its file has no suffix, and it may be called from anywhere."""
    path = tmp_path / "my-split"
    path.write_text("import program; program.main()")
    (tmp_path / "program.py").write_text(PROGRAM)
    found = children.python(path, "--workdir=run", "--width=5", cwd=tmp_path)
    assert " has width 5" in found.stdout, found.stderr


def test_a_program_without_a_file_cannot_start_its_clusters(monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(sys, "argv", ["-c"])
    with pytest.raises(errors.SettingsError, match="starts the script's file again"):
        roles._program()


@contextlib.contextmanager
def another_works_in(folder):
    """What is done in the block finds another process in the folder, and says so."""
    words = f"another process works in {folder}; wait"
    with run_folder.lock(folder), pytest.raises(errors.NebulaError, match=words):
        yield


@pytest.fixture
def given(tmp_path):
    """The flags of the process of `a`."""
    flags.FLAGS(["test"])
    with flagsaver.flagsaver(workdir=str(tmp_path), cluster="a", tls="off"):
        yield fields.read(roles.Flags)


def test_a_folder_is_of_one_command_at_a_time(tmp_path, given):
    with flagsaver.flagsaver(cluster="all"), another_works_in(tmp_path):
        roles._main({"a": print, "b": print}, frozenset())
    with another_works_in(tmp_path / "a"):
        roles._train(print, given, ["a", "b"], {})


def test_the_folder_of_a_cluster_is_its_first_processs(tmp_path, monkeypatch, given):
    monkeypatch.setattr(roles.ranks, "is_root", lambda: False)
    trained = []
    with (
        run_folder.lock(tmp_path / "a"),
        pytest.raises(errors.SettingsError, match="the function of a returned before"),
    ):
        roles._train(trained.append, given, ["a", "b"], {})
    assert trained
