"""How flags become values, and values flags."""

import dataclasses
import importlib
import pathlib
import re
import subprocess
import sys

import configured
import pytest
from absl import flags
from absl.testing import flagsaver

from experiments import shared_flags
from experiments.m3 import config as m3_config
from experiments.xnli import config as xnli_config
from nebula_jax import disk, errors
from nebula_jax.runtime import devices

ROOT = pathlib.Path(shared_flags.__file__).parents[1]
CONFIGS = {"pretrain_m3": m3_config, "finetune_xnli": xnli_config}
HEADS = "Of|Whether|What|How|Where|The same|Likewise"
COMMANDS = (
    *("experiments.pretrain_m3", "experiments.finetune_xnli"),
    *("scripts.train_vocabulary", "scripts.prepare_pretrained"),
    *("scripts.issue_certificates", "scripts.fake_rates", "scripts.table1_xnli"),
    *("scripts.bench_codecs", "scripts.bench_training", "scripts.bench_bridge"),
    "scripts.bench_faults",
    "scripts.make_tables",
)


def command(module, *arguments):
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("module", COMMANDS)
def test_every_help_text_stands_alone(module):
    """A sentence, and none that only makes sense behind the name of its flag."""
    importlib.import_module(module)
    found = flags.FLAGS.get_key_flags_for_module(module)
    assert found
    for flag in found:
        text = re.sub(r"^<[^>]*>: ", "", flag.help)  # the values of an enumeration
        assert re.match(r"[A-Z0-9]", text), flag.name
        assert not re.match(rf"({HEADS})\b", text), flag.name
        assert text.endswith("."), flag.name
        assert len(text.split()) > 1, flag.name


@pytest.mark.parametrize(
    ("module", "flag"),
    [
        ("experiments.finetune_xnli", "--window=3"),
        ("experiments.pretrain_m3", "--epochs=3"),
        ("scripts.issue_certificates", "--learning_rate=1"),
    ],
)
def test_a_flag_of_another_command_is_refused(module, flag):
    done = command(module, flag)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    name = flag.lstrip("-").partition("=")[0]
    assert line.startswith(f"error: Unknown command line flag '{name}'")


def test_an_argument_that_is_no_flag_is_refused():
    done = command("scripts.issue_certificates", "credentials")
    assert done.returncode == 2
    assert (
        done.stderr == "error: 'credentials' is no flag; every argument is a --flag\n"
    )


@pytest.mark.parametrize(("name", "config"), CONFIGS.items())
def test_an_experiments_own_defaults_hold(name, config):
    run = configured.run(config)
    values = dataclasses.asdict(run.agreed) | dataclasses.asdict(run.local)
    for flag, value in config.DEFAULTS.items():
        if isinstance(value, list):
            value = tuple(map(int, value))
        assert values[flag] == value
    assert flags.FLAGS["learning_rate"].default == 1e-4  # elsewhere


@pytest.mark.parametrize(
    ("config", "given"),
    [
        (m3_config, {}),
        (m3_config, {"generators": "en de|hi ur", "task_mix": "mrtd|trtd=2 mrtd"}),
        (m3_config, {"wan": "up:60mbit;down:1mbit,2ms", "learning_rate": 1e-7}),
        (xnli_config, {}),
        (xnli_config, {"max_train_pairs": 5, "tfds_dir": "a b", "languages": "en,sw"}),
        (xnli_config, {"notrim_vocabulary": "", "length_buckets": "8,16"}),
    ],
)
def test_arguments_make_the_same_run_again(config, given):
    arguments = [f"--{name}={each}" if each else f"--{name}" for name, each in
                 given.items()]  # fmt: skip
    run = configured.run(config, *map(str, arguments))
    again = configured.run(config, *shared_flags.arguments(run))
    assert again == run
    if given:
        assert run != configured.run(config)


def test_run_flags_alone_repeat_a_run(tmp_path, monkeypatch):
    run = configured.run(xnli_config, workdir=tmp_path, max_train_pairs=7, seed=3)
    shared_flags.write_run_flags(tmp_path, run)
    monkeypatch.setattr("sys.argv", ["test"])
    with flagsaver.flagsaver():
        assert shared_flags.parse_run(str(tmp_path), "finetune_xnli") == tmp_path
        assert xnli_config.from_flags() == run
    monkeypatch.setattr("sys.argv", ["test", "--seed=4"])  # this command's own
    with flagsaver.flagsaver():
        shared_flags.parse_run(str(tmp_path), "finetune_xnli")
        assert xnli_config.from_flags() == run.with_agreed(seed=4)


def test_run_flags_that_cannot_be_written_are_as_they_were(tmp_path, monkeypatch):
    run = configured.run(xnli_config, workdir=tmp_path, seed=3)
    shared_flags.write_run_flags(tmp_path, run)
    before = (tmp_path / "run.flags").read_text()

    def refuse(*paths):
        raise OSError("No space left on device")

    monkeypatch.setattr(disk, "rename", refuse)
    with pytest.raises(OSError, match="No space"):
        shared_flags.write_run_flags(tmp_path, run.with_agreed(seed=4))
    assert (tmp_path / "run.flags").read_text() == before


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_configuration_cannot_be_written(config):
    run = configured.run(config)
    for part in (run, run.agreed, run.local):
        with pytest.raises(dataclasses.FrozenInstanceError):
            part.seed = 7


def test_settings_have_a_flags_name_and_a_value_that_json_keeps():
    run = configured.run(xnli_config, length_buckets="8,16")
    values = shared_flags.settings(run.agreed)
    assert values["--length_buckets"] == "8,16"
    assert values["--seed"] == 0


def test_the_runs_folder_is_named_after_its_flagfile(monkeypatch):
    for arguments in (["--flagfile=a/b.flags"], ["--flagfile", "a/b.flags"]):
        line = "--flagfile=wan_60mbit.flags"
        monkeypatch.setattr("sys.argv", ["x.py", *arguments, line, "--steps=3"])
        run = configured.run(m3_config, workdir="")
        assert str(run.local.workdir) == "runs/b"


@pytest.mark.parametrize(
    ("given", "parts", "words"),
    [
        ({"batch_size": 6}, 4, "--micro_batches=4 does not divide --batch_size=6"),
        ({"model_parallel": 2, "devices_per_cluster": 3}, 1, "does not divide"),
        ({"devices_per_cluster": 3}, 1, "--batch_size=16 does not divide over 3"),
        ({"devices_per_cluster": 8}, 4, "a micro-batch of 4 (--batch_size=16"),
    ],
)
def test_devices_that_cannot_share_a_batch_are_refused(given, parts, words):
    run = configured.run(m3_config, **given)
    with pytest.raises(errors.SettingsError, match=re.escape(words)):
        devices.check(
            *(run.agreed.batch_size, run.local.devices_per_cluster),
            *(run.local.model_parallel, parts),
        )


@pytest.mark.parametrize(
    ("module", "flag"),
    [
        ("pretrain_m3", "--learning_rate=nan"),
        ("train_abnet", b"--workdir=\xff"),
        ("finetune_xnli", "--seed=4294967296"),
    ],
)
def test_bad_values_are_one_line(module, flag):
    done = command(f"experiments.{module}", flag)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")


@pytest.mark.parametrize("value", ["²", "8,²", "1" * 5000, "-1", "8 9"])
def test_lists_of_numbers_have_numbers(value):
    with pytest.raises(errors.SettingsError, match="expected numbers such as"):
        configured.run(xnli_config, length_buckets=value)
