"""A run over two clusters that chooses the codec of its deltas by itself."""

import json
import shutil

import jax
import numpy as np
import pytest

from experiments.bert import report
from experiments.local_steps import config as local_steps_config
from nebula_jax.parallel.local_steps import delta_control

CLUSTERS = ("cluster-0", "cluster-1")
STEPS, SAVED = 24, 12
RUN = {
    "steps": STEPS,
    "checkpoint_every": SAVED,
    "inner_steps": 4,
    "fragments": 2,
    "delay": 0,
    "delta_codec": "auto",
    "tls": "off",
    # Slow, so that whatever crosses is waited for.
    "wan": "400kbit,1ms",
}


@pytest.fixture(scope="module")
def split(runs):
    """A run over a slow line: its folder."""
    status, output = runs.run(workdir="split", **RUN)
    assert status == 0, output
    return runs.folder / "split"


def tape_of(workdir):
    """The rows of the tape, as the summaries of both clusters have them."""
    one, two = (
        json.loads((workdir / name / "summary.json").read_text())["rounds"]["tape"]
        for name in CLUSTERS
    )
    assert one == two
    return np.array(one)


def test_it_begins_gentle_and_goes_on_harder_while_the_line_is_waited_for(split):
    tape = tape_of(split)
    number, rung, _, cosine, _, waits = tape.T
    np.testing.assert_array_equal(number, np.arange(1, len(tape) + 1))
    assert len(tape) >= STEPS // 2  # each of 2 fragments every 4 steps, and at the end
    # Programs are compiled in the first rounds; the machine may have other work later.
    assert np.sum(waits[2:] <= 1) <= 2
    assert set(rung[:5]) == {0.0}
    assert (np.diff(rung) >= 0).all()
    assert rung[-1] > 0
    assert (cosine > 0.98).all()


def test_the_report_names_the_codecs_and_their_rounds(split):
    text = report.markdown(json.loads((split / "summary.json").read_text()))
    assert "Deltas of cluster:0, cluster:1:" in text
    gentle, harder, _ = local_steps_config.LADDER
    assert f"| 1 | `{gentle}` |" in text
    assert f"`{harder}`" in text


def test_a_run_that_goes_on_takes_what_clocks_measured_from_their_files(runs, split):
    """And ends with the same parameters, bit for bit, whatever they would measure."""
    resumed = runs.folder / "resumed"
    shutil.copytree(split, resumed)
    for name in CLUSTERS:
        shutil.rmtree(resumed / name / "checkpoints" / f"{STEPS:08d}")
        (resumed / name / "summary.json").unlink()
        assert (resumed / name / delta_control.FILE).is_file()
    (resumed / "summary.json").unlink()
    status, output = runs.run(workdir="resumed", **RUN | {"wan": ""})
    assert status == 0, output
    assert "going on after step" in output
    np.testing.assert_array_equal(tape_of(resumed), tape_of(split))
    for name in CLUSTERS:
        jax.tree.map(
            np.testing.assert_array_equal,
            runs.state("resumed", name, STEPS),
            runs.state("split", name, STEPS),
        )
