"""A pipeline of layers inside a cluster, by its flag."""

import jax
import numpy as np
import pytest

RUN = {
    "cluster": "whole",
    "steps": 2,
    "checkpoint_every": 2,
    "dropout": 0.0,  # whose bits are a micro-batch's own
    "generator_layers": 2,
    "discriminator_layers": 2,
    "devices_per_cluster": 2,
    "fsdp": 2,
}
CLUSTERS = ("discriminator", "generator-0", "generator-1")


@pytest.mark.slow
def test_layers_over_two_devices_train_what_they_do_in_turn(runs):
    for pipeline in (0, 2):
        status, output = runs.run(workdir=f"p{pipeline}", pipeline=pipeline, **RUN)
        assert status == 0, output
    for cluster in CLUSTERS:
        plain, piped = (
            runs.state(f"p{pipeline}", cluster, 2)["params"] for pipeline in (0, 2)
        )
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), plain, piped
        )
