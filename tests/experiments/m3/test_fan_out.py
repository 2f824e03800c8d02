import pytest

RUN = {"steps": 4, "checkpoint_every": 2}


@pytest.mark.slow  # in one process: tests/parallel/test_fan_out.py
def test_micro_batches_over_a_line_are_those_of_one_process(runs):
    """One generator; how those of two are joined is in parallel/test_fan_out.py."""
    given = RUN | {"generators": "en", "task_mix": "mrtd", "fan_out": 2, "tls": "off"}
    for cluster in ("whole", "all"):
        runs.finished(cluster=cluster, workdir=cluster, **given)
    runs.assert_same("all", "whole", ("discriminator", "generator-0"), 4)
