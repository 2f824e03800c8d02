from unittest import mock

import configured
import pytest
from absl import flags
from absl.testing import flagsaver

from experiments import configuration
from experiments.abnet import config as abnet_config
from experiments.m3 import config as m3_config
from experiments.xnli import config as xnli_config
from nebula_jax import disk, errors
from nebula_jax.runtime.records import checkpoints
from nebula_jax.training import checkpoint, checkpoint_files


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


def test_the_flags_of_a_run_are_read_beside_those_of_this_process(tmp_path):
    """As in a notebook, which has none; of one cluster's folder where that is all."""
    run = configured.run(abnet_config, workdir=tmp_path, seed=3)
    configuration.write_run_flags(tmp_path / "source", run)
    before = flags.FLAGS["seed"].value
    found = abnet_config.from_flags(configuration.flags_of_run(tmp_path, "train_abnet"))
    assert found == run
    assert flags.FLAGS["seed"].value == before
    with pytest.raises(errors.SettingsError, match="no run of train_abnet is there"):
        configuration.flags_of_run(tmp_path / "nowhere", "train_abnet")
    (tmp_path / "source" / "run.flags").write_text("--no_such_flag=1\n")
    with pytest.raises(errors.SettingsError, match="is of no run of train_abnet in"):
        configuration.flags_of_run(tmp_path, "train_abnet")


@pytest.mark.parametrize(
    ("config", "module", "shape"),
    [
        (
            m3_config,
            "pretrain_m3",
            {"generators": "en de|sw", "generator_size": "nano", "task_mix": "mrtd"},
        ),
        (abnet_config, "train_abnet", {"objective": "ar", "bottleneck": 8}),
    ],
)
def test_a_run_that_begins_with_another_has_its_model(tmp_path, config, module, shape):
    """But for what is given; rate and batch are no part of a model."""
    given = {"batch_size": 8, "cluster": "whole"}
    earlier = configured.run(config, workdir=tmp_path, max_length=32, **shape, **given)
    configuration.write_run_flags(tmp_path / "whole", earlier)
    with flagsaver.flagsaver():
        configured.parse(config, init_from=tmp_path, max_length=16)
        configuration.take_model(module, config.FLAGS)
        run = config.from_flags()
        assert (run.agreed.batch_size, run.local.cluster) == (16, "all")
        assert flags.FLAGS["max_length"].value == 16
        assert {name: getattr(run.agreed, name) for name in shape} == shape
    with flagsaver.flagsaver():  # a run that resumes needs the older one no more
        configured.parse(config, init_from=tmp_path / "gone")
        configuration.take_model(module, config.FLAGS)


def test_run_flags_are_of_the_run_that_has_the_checkpoints(tmp_path):
    """A run that is refused leaves those of the one that is there."""
    run, path = configured.run(m3_config, workdir=tmp_path), tmp_path / "run.flags"
    path.write_text("as they were")
    context = mock.Mock(folder=tmp_path)
    context.open_checkpoints.side_effect = checkpoint.CheckpointError("another run")
    with pytest.raises(checkpoint.CheckpointError):
        run.open_checkpoints(context, {})
    assert path.read_text() == "as they were"
    context.open_checkpoints.side_effect = None
    run.open_checkpoints(context, {})
    assert f"--workdir={tmp_path}" in path.read_text().splitlines()


def test_the_runs_folder_is_named_after_its_flagfile(monkeypatch):
    for arguments in (["--flagfile=a/b.flags"], ["--flagfile", "a/b.flags"]):
        line = "--flagfile=wan_60mbit.flags"
        monkeypatch.setattr("sys.argv", ["x.py", *arguments, line, "--steps=3"])
        run = configured.run(m3_config, workdir="")
        assert str(run.local.workdir) == "runs/b"


@pytest.mark.parametrize(
    ("config", "cluster"), [(m3_config, "discriminator"), (abnet_config, "source")]
)
def test_a_run_resumes_by_the_step_that_it_began_with(
    config, cluster, tmp_path, monkeypatch
):
    """Wherever the older run has come to since, and if it is gone."""
    monkeypatch.setattr(checkpoints, "newest_in_all", lambda folder, clusters: 7)
    younger = {"workdir": tmp_path / "younger", "init_from": tmp_path / "older"}
    run = configured.run(config, cluster=cluster, **younger)
    assert config.earlier_step(run) == 7
    saved = checkpoints.folder_of(run.local.workdir, cluster) / "00000001"
    about = {"settings": {"--init_from": "step 5"}}
    disk.make_folder(saved)
    (saved / checkpoint_files.MANIFEST).write_bytes(
        checkpoint_files.encode_manifest(1, about, {"arrays": ""})
    )
    assert config.earlier_step(run) == 5
