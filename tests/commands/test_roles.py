"""What `nebula.main` refuses: flags, names and roles of a script, in one line each."""

import subprocess
import sys

import pytest

SCRIPT = """
from absl import flags
import nebula_jax as nebula

flags.DEFINE_string("data", "", "Folder.")
if __name__ == "__main__":
    nebula.main({roles}, {more})
"""


def ended(tmp_path, *flags, roles='{"front": print, "back": print}', more=""):
    """Runs a script; returns its status, and what it has written."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(roles=roles, more=more))
    command = [sys.executable, str(path), *flags]
    found = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    return found.returncode, found.stdout + found.stderr


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"more": "defaults={'stepz': 3}"}, "error: defaults={'stepz': 3}: "),
        ({"more": "defaults={'steps': 'x'}"}, "error: defaults={'steps': 'x'}: "),
        ({"more": "own_flags=['dota']"}, "error: own_flags=['dota']: the script"),
        ({"roles": "{'all': print, 'b': print}"}, "error: roles={'all': ...}: "),
        ({"roles": "{'a/b': print, 'b': print}"}, "error: 'a/b' is no cluster's name"),
    ],
)
def test_what_a_script_gives_wrongly_is_one_line(tmp_path, given, words):
    status, output = ended(tmp_path, **given)
    assert status == 2
    assert output.startswith(words)
    assert output.count("\n") == 1


def test_help_names_the_scripts_own_clusters(tmp_path):
    status, output = ended(tmp_path, "--help")
    assert status == 0
    assert "front, back; or all" in " ".join(output.split())
    assert "whole" not in output
