"""A reader's own model, split by the real command and in two threads."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import tiny_runs
import two_halves

from experiments import split_your_model as example
from nebula_jax.communication import codecs

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """Starts the real command, its standard error merged into its output."""
    folder = tmp_path_factory.mktemp("split_your_model")
    environment = {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{tiny_runs.QUICK_START}",
    }

    def start(**flags):
        flags = [f"--{name}={value}" for name, value in flags.items()]
        return subprocess.Popen(
            [sys.executable, "-m", "experiments.split_your_model", *flags],
            cwd=folder,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    start.folder = folder
    return start


def test_the_command_splits_a_model_and_it_is_the_uncut_one(command):
    """What is printed: loss, accuracy, bytes each way, and the largest difference."""
    run = command(steps=6, log_every=3, wan="60mbit,15ms")
    output = run.communicate(timeout=60)[0]
    assert run.returncode == 0, output
    line = re.compile(
        r"back  step    6/6  accuracy (\S+)  loss (\S+)  \d+ ms/step"
        r"  ([\d,]+) bytes/step sent  ([\d,]+) bytes/step received"
    )
    _, loss, *moved = line.search(output).groups()
    assert 0 < float(loss) < 3
    plain = 64 * 4 * 4 * 32 * 4  # of a batch's hidden states, float32
    for each in moved:
        assert plain < int(each.replace(",", "")) < plain + 1000
    difference = re.search(r"largest difference of a parameter: (\S+)", output)[1]
    assert float(difference) < 1e-5
    assert not list(command.folder.glob("runs/*/tls"))


def test_when_a_cluster_dies_all_processes_end(command):
    run = command(steps=10_000, log_every=1)
    for line in run.stdout:
        if "front step" in line:
            break
    children = subprocess.run(
        ["pgrep", "-P", str(run.pid)], capture_output=True, text=True, check=True
    ).stdout.split()
    assert len(children) == 2
    os.kill(int(children[1]), signal.SIGKILL)
    output = run.communicate(timeout=20)[0]
    assert run.returncode == 1
    assert "error: front was killed by SIGKILL; all clusters ended" in output
    deadline = time.monotonic() + 5
    while any(pathlib.Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def whole(rank=0):
    return {cluster: example.init(0, rank, cluster) for cluster in ("front", "back")}


def trained(named, steps, rank=0):
    """The split model after some steps, its accuracy by step, and bytes received."""
    params, history = whole(rank), []
    about = example.spec(rank), codecs.from_string(named)
    with two_halves.met() as (there, here):

        def front():
            with there:
                batches = example.micro_batches(0, steps, 0)
                args = there, params["front"], batches, *about
                return example.train_front(*args, lambda step, metrics: None)

        def back():
            with here:
                batches = example.micro_batches(0, steps, 1)
                args = here, params["back"], batches, *about
                own = example.train_back(
                    *args, lambda step, metrics: history.append(metrics["accuracy"])
                )
            return own, here.ledger["received hidden"][1]

        (own, received), other = two_halves.both(front, back)
    return {"front": other, "back": own}, np.array(history), received


def test_it_learns_with_an_eighth_of_the_bits_as_well():
    steps = 60
    params, history, received = trained("int4(64)", steps)
    assert history[:10].mean() < 0.4
    assert history[-10:].mean() > 0.7
    plain = steps * 64 * 4 * 4 * 32 * 4
    assert received < plain / 6
    assert example.accuracy(params, 0) > 0.7


def test_the_two_sides_read_the_same_batches_each_its_part():
    images, labels = (list(example.micro_batches(3, 2, part)) for part in (0, 1))
    for number in range(2):
        want = example.draw(3, number)
        np.testing.assert_array_equal(np.concatenate(images[number]), want[0])
        np.testing.assert_array_equal(np.concatenate(labels[number]), want[1])
    params = whole()["front"]
    shape = jax.eval_shape(example.front, params, images[0][0], example.RNG)
    wanted = example.spec(0)
    assert (shape.shape, shape.dtype) == (wanted.shape, wanted.dtype)


def test_a_bottleneck_sends_fewer_columns_and_is_the_uncut_one_with_it(command):
    run = command(steps=6, log_every=3, bottleneck=5)
    output = run.communicate(timeout=60)[0]
    assert run.returncode == 0, output
    moved = re.search(r"back  step    6/6 .* ([\d,]+) bytes/step sent", output)[1]
    plain = 64 * 4 * 4 * 5 * 4
    assert plain < int(moved.replace(",", "")) < plain + 1000
    difference = re.search(r"largest difference of a parameter: (\S+)", output)[1]
    assert float(difference) < 1e-5


def test_it_learns_behind_a_bottleneck():
    steps = 60
    params, history, received = trained("int4(16)", steps, rank=16)
    assert history[-10:].mean() > 0.7
    assert received < steps * 64 * 4 * 4 * 32 * 4 / 10
    assert example.accuracy(params, 0) > 0.7


def test_more_columns_than_there_are_are_refused(command):
    output = command(bottleneck=33).communicate(timeout=30)[0]
    assert "error: --bottleneck=33: expected 1 to 32 columns" in output


@pytest.mark.parametrize(
    ("codec", "words"),
    [
        ("int9(64)", "unknown codec int9; did you mean int8?"),
        ("pack_tokens", "--codec=pack_tokens: one leaf must be called 'mask'; 0 are"),
    ],
)
def test_codecs_that_mean_nothing_are_named(command, codec, words):
    output = command(codec=codec).communicate(timeout=30)[0]
    assert f"error: {words}" in output
    assert "Traceback" not in output
