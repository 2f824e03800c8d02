"""Bad input: one clear line and a non-zero exit, before anything starts."""

import re
import socket

import pytest
from absl import flags
from absl.testing import flagsaver

from experiments import pretrain_m3
from nebula_jax import errors
from nebula_jax.commands import command_line


def fails_here(runs, monkeypatch, words, **values):
    """Asserts that the command fails in this process, with what it would print."""
    monkeypatch.chdir(runs.folder)
    given = {"generators": "en de|sw", "data_dir": str(runs.text), "steps": 3}
    given |= {"workdir": "bad", "vocabulary": "none.model"}
    flags.FLAGS(["test"])
    with (
        flagsaver.flagsaver(**given | values),
        pytest.raises(errors.NebulaError, match=re.escape(words)),
    ):
        pretrain_m3.main()


@pytest.mark.parametrize("flag", ["--steps=many", "--steps=0"])
def test_bad_flags_are_refused(flag):
    with flagsaver.flagsaver(), pytest.raises(flags.Error, match=flag):
        command_line.parse(["test", flag])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"cluster": "teacher"}, "--cluster=teacher: expected all, whole"),
        ({"cluster": "generator:0"}, "needs peer=HOST:PORT"),
        ({"cluster": "generator:7", "peer": "h:1", "tls": "off"}, "--generators has 2"),
        ({"cluster": "generator:x", "peer": "h:1", "tls": "off"}, "expected all"),
        ({"cluster": "generator:²", "peer": "h:1", "tls": "off"}, "expected all"),
        ({"generators": "en|../sw"}, "'../sw' is no language"),
        ({"generators": "9" * 9}, "families.json is missing"),
        ({"cluster": "discriminator"}, "needs listen=HOST:PORT"),
        ({"generators": "en|sw", "task_mix": "trtd"}, "generator:0 has no language"),
        ({"model_parallel": 3, "devices_per_cluster": 2}, "does not divide"),
        ({"connect_timeout": 0.0}, "must be above 0"),
        ({"data_dir": "/nowhere"}, "there is no such folder"),
        ({"generators": "en de|ur"}, "language 'ur' has no text"),
        ({"vocabulary": "none.model"}, "No such file"),
        ({"vocabulary": __file__}, "not a sentencepiece model"),
        ({"data_dir": "package:numpy"}, "the only package is package:django"),
        (
            {"cluster": "generator:0", "peer": "h:1", "tls": "off", "vocabulary": ""},
            "needs --vocabulary",
        ),
    ],
)
def test_impossible_combinations_are_refused_in_words(runs, monkeypatch, values, words):
    fails_here(runs, monkeypatch, words, **values)


def test_a_port_in_use(runs, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = f"cannot listen on 127.0.0.1:{port}: Address already in use"
        fails_here(runs, monkeypatch, words, listen=f"127.0.0.1:{port}")


def test_a_folder_that_cannot_be_written(runs, tmp_path):
    (tmp_path / "file").write_text("")
    status, output = runs.run_here(steps=3, workdir=tmp_path / "file" / "run")
    (line,) = output.splitlines()
    assert line.startswith("error: ")
    assert "Not a directory; name another --workdir" in line
    assert status == 2
