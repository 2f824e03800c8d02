"""Generators that differ: one comes late and is slow. Killed ones: test_pretrain_m3."""

import json
import time

import jax
import numpy as np
import ports
import pytest

from nebula_jax.training import metrics

CLUSTERS = ("discriminator", "generator-0", "generator-1")
STEPS, WINDOW, SLOW = 16, 2, 0.15
RUN = {"steps": STEPS, "checkpoint_every": STEPS, "window": WINDOW, "log_every": 1}


@pytest.mark.slow
def test_a_slow_generator_that_comes_late_changes_the_pace_and_no_number(runs):
    status, output = runs.run(workdir="even", **RUN)
    assert status == 0, output
    given = (runs.folder / "even" / "run.flags").read_text().splitlines()
    vocabulary = next(each for each in given if each.startswith("--vocabulary="))
    address = f"127.0.0.1:{ports.free_port()}"
    common = RUN | {"workdir": "uneven", "tls": "off"}
    started = [
        runs.start(vocabulary, cluster="discriminator", listen=address, **common),
        runs.start(vocabulary, cluster="generator:0", peer=address, **common),
    ]
    time.sleep(3.0)
    slow = {"emulate_compute": f"{round(1000 * SLOW)},0", "wan": "2mbit,10ms"}
    started.append(
        runs.start(vocabulary, cluster="generator:1", peer=address, **common | slow)
    )
    outputs = [each.communicate(timeout=120)[0] for each in started]
    assert [each.returncode for each in started] == [0, 0, 0], outputs
    for cluster in CLUSTERS:
        jax.tree.map(
            np.testing.assert_array_equal,
            runs.state("uneven", cluster, STEPS),
            runs.state("even", cluster, STEPS),
        )
    # The quick one is never further ahead than the window, so it waits.
    quick, leader = (
        {each["step"]: each["time"] for each in metrics.read(folder) if "loss" in each}
        for folder in (runs.folder / "uneven" / name for name in CLUSTERS[1::-1])
    )
    for step in range(WINDOW + 2, STEPS + 1):
        assert quick[step] > leader[step - 1 - WINDOW] - 0.1  # written after its token
    summary = runs.folder / "uneven" / "generator-0" / "summary.json"
    waited = json.loads(summary.read_text())["waited_seconds"]
    assert waited > 0.5 * SLOW * (STEPS - WINDOW)
