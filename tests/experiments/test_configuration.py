import dataclasses

import configured
import pytest
from absl.testing import flagsaver

from experiments import configuration
from experiments.bert import config as bert_config
from experiments.m3 import config as m3_config
from experiments.xnli import config as xnli_config
from nebula_jax import disk, errors

CONFIGS = {
    "pretrain_m3": m3_config,
    "pretrain_bert": bert_config,
    "finetune_xnli": xnli_config,
}


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
    again = configured.run(config, *configuration.arguments(run))
    assert again == run
    if given:
        assert run != configured.run(config)


def test_run_flags_alone_repeat_a_run(tmp_path, monkeypatch):
    run = configured.run(xnli_config, workdir=tmp_path, max_train_pairs=7, seed=3)
    configuration.write_run_flags(tmp_path, run)
    monkeypatch.setattr("sys.argv", ["test"])
    with flagsaver.flagsaver():
        assert configuration.parse_run(str(tmp_path), "finetune_xnli") == tmp_path
        assert xnli_config.from_flags() == run
    monkeypatch.setattr("sys.argv", ["test", "--seed=4"])  # this command's own
    with flagsaver.flagsaver():
        configuration.parse_run(str(tmp_path), "finetune_xnli")
        assert xnli_config.from_flags() == run.with_agreed(seed=4)


def test_run_flags_that_cannot_be_written_are_as_they_were(tmp_path, monkeypatch):
    run = configured.run(xnli_config, workdir=tmp_path, seed=3)
    configuration.write_run_flags(tmp_path, run)
    before = (tmp_path / "run.flags").read_text()

    def refuse(*paths):
        raise OSError("No space left on device")

    monkeypatch.setattr(disk, "rename", refuse)
    with pytest.raises(OSError, match="No space"):
        configuration.write_run_flags(tmp_path, run.with_agreed(seed=4))
    assert (tmp_path / "run.flags").read_text() == before


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_configuration_cannot_be_written(config):
    run = configured.run(config)
    for part in (run, run.agreed, run.local):
        with pytest.raises(dataclasses.FrozenInstanceError):
            part.seed = 7


def test_settings_have_a_flags_name_and_a_value_that_json_keeps():
    run = configured.run(xnli_config, length_buckets="8,16")
    values = configuration.settings(run.agreed)
    assert values["--length_buckets"] == "8,16"
    assert values["--seed"] == 0


def test_the_runs_folder_is_named_after_its_flagfile(monkeypatch):
    for arguments in (["--flagfile=a/b.flags"], ["--flagfile", "a/b.flags"]):
        line = "--flagfile=wan_60mbit.flags"
        monkeypatch.setattr("sys.argv", ["x.py", *arguments, line, "--steps=3"])
        run = configured.run(m3_config, workdir="")
        assert str(run.local.workdir) == "runs/b"


def test_a_list_may_have_one_number():
    assert configured.run(bert_config, clusters=3).agreed.clusters == 3
    for value in ("", "1,2", "²", "x"):
        with pytest.raises(errors.SettingsError, match=f"--clusters={value}: exp"):
            configured.run(bert_config, clusters=value)


@pytest.mark.parametrize("value", ["²", "8,²", "1" * 5000, "-1", "8 9"])
def test_lists_of_numbers_have_numbers(value):
    with pytest.raises(errors.SettingsError, match="expected numbers such as"):
        configured.run(xnli_config, length_buckets=value)
