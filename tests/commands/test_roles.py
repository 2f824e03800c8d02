"""What `nebula.main` refuses: flags, names and roles of a script, in one line each."""

import children
import pytest
from absl import flags
from absl.testing import flagsaver

from nebula_jax import errors
from nebula_jax.commands import fields, roles
from nebula_jax.runtime.records import run_folder

SCRIPT = """
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
"""
LINES = [
    "error: defaults={'stepz': 3}: ",
    "error: defaults={'steps': 'x'}: ",
    "error: own_flags=['dota']: the script",
    "error: roles={'all': ...}: ",
    "error: 'a/b' is no cluster's name",
]


def ended(tmp_path, *flags):
    """Runs the script; returns what it has printed, and its errors."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    found = children.python(path, *flags, cwd=tmp_path)
    return found.stdout, found.stderr.splitlines()


def test_what_a_script_gives_wrongly_is_one_line(tmp_path):
    statuses, lines = ended(tmp_path)
    assert statuses == "2\n" * len(LINES)
    for found, words in zip(lines, LINES, strict=True):
        assert found.startswith(words)


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
    found = children.python("-c", f"{PROGRAM}\nmain()", cwd=tmp_path)
    assert "error: --cluster=all starts the script's file" in found.stderr


@pytest.mark.parametrize(("cluster", "folder"), [("all", "run"), ("a", "run/a")])
def test_a_folder_is_of_one_command_at_a_time(tmp_path, cluster, folder):
    path = tmp_path / "program.py"
    path.write_text(f"{PROGRAM}\nmain()")
    flags = f"--cluster={cluster}", "--workdir=run"
    with run_folder.lock(tmp_path / folder):
        found = children.python(path, *flags, cwd=tmp_path)
    assert found.returncode == 1
    assert f"error: another process works in {folder}; wait" in found.stderr


def test_the_folder_of_a_cluster_is_its_first_processs(tmp_path, monkeypatch):
    flags.FLAGS(["test"])
    with flagsaver.flagsaver(workdir=str(tmp_path), cluster="a", tls="off"):
        given = fields.read(roles.Flags)
    monkeypatch.setattr(roles.ranks, "is_root", lambda: False)
    trained = []
    with (
        run_folder.lock(tmp_path / "a"),
        pytest.raises(errors.SettingsError, match="the function of a returned before"),
    ):
        roles._train(trained.append, given, ["a", "b"], {})
    assert trained


def test_help_names_the_scripts_own_clusters(tmp_path):
    output, _ = ended(tmp_path, "--help")
    assert "front, back; or all" in " ".join(output.split())
    assert "whole" not in output
