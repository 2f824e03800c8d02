import re

import configured
import jax
import numpy as np
import pytest

from experiments.m3 import config
from nebula_jax import errors

CLUSTERS = ("discriminator", "generator-0", "generator-1")
RUN = {"steps": 4, "checkpoint_every": 2}


def states(runs, workdir, step=4):
    return [runs.state(workdir, cluster, step) for cluster in CLUSTERS]


@pytest.mark.slow  # in one process: tests/parallel/test_fan_out.py
def test_micro_batches_over_a_line_are_those_of_one_process(runs):
    """One generator; how those of two are joined is in parallel/test_fan_out.py."""
    given = RUN | {"generators": "en", "task_mix": "mrtd", "fan_out": 2, "tls": "off"}
    for cluster in ("whole", "all"):
        status, output = runs.run(cluster=cluster, workdir=cluster, **given)
        assert status == 0, output
    over_a_line, of_one_process = (
        [runs.state(workdir, cluster, 4) for cluster in CLUSTERS[:2]]
        for workdir in ("all", "whole")
    )
    jax.tree.map(np.testing.assert_array_equal, over_a_line, of_one_process)


@pytest.mark.slow
def test_what_is_measured_is_chosen_explained_and_kept(runs):
    """The second start goes on with the number of the first, without measuring."""
    given = RUN | {"fan_out": "auto", "devices_per_cluster": 2, "workdir": "auto"}
    status, output = runs.run(**given)
    assert status == 0, output
    chosen = re.findall(r"--fan_out=auto: (\d)\. The slowest generator makes", output)
    assert len(chosen) == 1
    assert chosen[0] in "12"
    for cluster in CLUSTERS:
        folder = runs.folder / "auto" / cluster / "checkpoints"
        (folder / "00000004").rename(runs.folder / f"{cluster}-4")
    status, output = runs.run(**given)
    assert status == 0, output
    assert "The slowest generator makes" not in output
    after = states(runs, "auto")
    for cluster in CLUSTERS:
        folder = runs.folder / "auto" / cluster / "checkpoints"
        (folder / "00000004").rename(runs.folder / f"{cluster}-again")
        (runs.folder / f"{cluster}-4").rename(folder / "00000004")
    jax.tree.map(np.testing.assert_array_equal, after, states(runs, "auto"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fan_out": 0}, "--fan_out=0: expected a number from 1, or auto"),
        ({"fan_out": "many"}, "--fan_out=many: expected a number from 1, or auto"),
        (
            {"fan_out": "auto", "cluster": "whole"},
            "--fan_out=auto measures two clusters; with --cluster=whole give a number",
        ),
    ],
)
def test_a_number_that_cannot_be_is_an_error_in_words(runs, given, message):
    run = configured.run(config, **runs.flags() | given)
    with pytest.raises(errors.SettingsError, match=re.escape(message)):
        config.check(run)
