import jax
import numpy as np
import pytest

CLUSTERS = ("discriminator", "generator-0", "generator-1")
RUN = {"steps": 4, "checkpoint_every": 2}


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
