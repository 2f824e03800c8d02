"""Flags: each defined once, in plain words, and read by `main` alone."""

import os
import pathlib

import children
import pytest
import tiny_runs

from experiments import shared_flags
from nebula_jax.commands import command_line

ROOT = pathlib.Path(shared_flags.__file__).parents[1]


def command(module, *arguments):
    return children.python(
        "-m",
        module,
        *arguments,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": tiny_runs.QUICK_PATH},
    )


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--epochs=3", "Unknown command line flag 'epochs'"),  # another command's
        ("credentials", "'credentials' is no flag; every argument is a --flag"),
        (b"--out=\xff", ""),
    ],
)
def test_a_bad_argument_is_one_line(argument, words):
    done = command("scripts.issue_certificates", argument)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {words}")


def test_help_has_the_flags_by_their_groups():
    done, full = (
        command("scripts.train_vocabulary", wanted, "--out=x")
        for wanted in ("--help", "--helpfull")
    )
    assert done.returncode == 0
    about, *groups = done.stdout.split(":\n  --")
    assert about.startswith("Makes the vocabulary that all clusters")
    titles = [about, *groups]
    ends = [text.splitlines()[-1].partition(" (")[0] for text in titles[:-1]]
    assert ends == [each for each in command_line.GROUPS.values() if each in ends]
    assert "To begin with" in ends
    assert f"\n{'  --learning_rate=0.0001':30}Peak learning rate.\n" in done.stdout
    assert "--job=pretrain_m3 " in done.stdout  # this command's default
    assert max(map(len, full.stdout.splitlines())) <= command_line.WIDTH
    assert "--head_priors" in groups[-1]
    assert "Set the biases" not in done.stdout
    assert "Set the biases" in full.stdout
    assert "--objective" not in done.stdout  # another command's
