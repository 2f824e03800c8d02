"""The examples of the face: what two and three clusters train is the uncut model."""

import json
import os
import signal
import subprocess
import time

import jax
import numpy as np
import optax
import ports
import pytest
import trees
from example_runs import ended, params, start, train_here

import nebula_jax as nebula
from experiments import chain_of_three, split_your_model
from nebula_jax.training import checkpoint, metrics


def whole(loss, parts, optimizer, steps, batches):
    """Trains the uncut model on whole batches; returns the parameters of its parts."""
    gradients = jax.jit(jax.grad(lambda params, batch: loss(params, batch)))
    states = [nebula.state(each, optimizer) for each in parts]
    for step in range(1, steps + 1):
        grads = gradients([each.params for each in states], batches(step))
        states = [each.apply(own) for each, own in zip(states, grads, strict=True)]
    return [each.params for each in states]


def assert_told(output, folder):
    """A program is told phases, records and files, and nothing else."""
    found = [json.loads(line) for line in output.splitlines() if line[:1] == "{"]
    assert not [line for line in output.splitlines() if line.startswith("|")]
    for cluster, other in (("front", "back"), ("back", "front")):
        own = [each for each in found if each.get("cluster") == cluster]
        phases = [each["phase"] for each in own if "phase" in each]
        assert phases[0] == "preparing"
        assert {f"waiting for {other}", "initializing"} <= set(phases)
        assert phases[-2:] == ["compiling", "training"]
        assert [each["step"] for each in own if "step" in each] == [3, 6]
    assert found[-1]["report"][0] == "runs/split_your_model/summary.json"
    assert "Bytes that crossed" in (folder / "report.html").read_text("utf-8")
    summary = json.loads((folder / "summary.json").read_text())
    for each in summary["clusters"]:
        assert each["last_step"] == 6
        assert each["until_first_step"]["compiling"] > 0


def test_a_decoder_in_two_clusters_is_the_uncut_one(tmp_path):
    example = split_your_model
    flags = {"steps": 6, "log_every": 3, "trace": 1, "log_format": "json"}
    output = ended(start(tmp_path, "split_your_model", **flags))
    folder = tmp_path / "runs" / "split_your_model"
    assert_told(output, folder)
    assert (folder / "losses.png").read_bytes().startswith(b"\x89PNG")
    lanes = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert {"front", "back"} <= {
        str(each.get("args", {}).get("name")) for each in lanes
    }

    def loss(params, batch):
        h = example.front(params[0], batch[0], None)
        return example.back(params[1], h, batch[1], None)

    def batches(step):
        return [np.concatenate(example.micro_batches(step, n)[1]) for n in (0, 1)]

    begin = [example.FRONT_PARAMS, example.BACK_PARAMS]
    expected = whole(loss, begin, example.OPTIMIZER, 6, batches)
    for name, like, one in zip(("front", "back"), begin, expected, strict=True):
        found = params(folder, name, 6, like)
        trees.assert_close(
            found, one, atol=2e-4
        )  # Adam divides by what is almost nothing


@pytest.mark.slow
@pytest.mark.parametrize("victims", [("middle",), ("front", "back")], ids="-".join)
def test_a_chain_goes_on_to_the_same_bits_after_any_kill(tmp_path, victims):
    flags = {"steps": 40, "checkpoint_every": 10, "log_every": 40}
    flags["codec"] = "error_feedback(int8(32))"
    for killed, step in zip(victims, ("00000010", "00000020"), strict=False):
        run = start(tmp_path, "chain_of_three", workdir="killed", **flags)
        saved = tmp_path / "killed" / killed / "checkpoints" / step
        while run.poll() is None and not saved.exists():
            time.sleep(0.01)
        found = subprocess.run(
            ["pgrep", "-P", str(run.pid), "-f", f"cluster={killed}"],
            capture_output=True,
            text=True,
            check=True,
        )
        os.kill(int(found.stdout), signal.SIGKILL)
        output = run.communicate(timeout=120)[0]
        assert f"error: {killed} was killed by SIGKILL; all clusters ended" in output
    ended(start(tmp_path, "chain_of_three", workdir="killed", **flags))
    roles = {
        "front": chain_of_three.train_front,
        "middle": chain_of_three.train_middle,
        "back": chain_of_three.train_back,
    }
    train_here(roles, tmp_path / "unbroken", **flags)
    for name in roles:
        one, two = (
            checkpoint.read(folder / name / "checkpoints", 40)
            for folder in (tmp_path / "killed", tmp_path / "unbroken")
        )
        assert one.keys() == two.keys()
        for leaf in one:
            np.testing.assert_array_equal(one[leaf], two[leaf])


@pytest.mark.slow
def test_a_cluster_that_is_to_stop_waits_for_no_lost_peer_and_the_run_goes_on(tmp_path):
    where, by_hand = f"127.0.0.1:{ports.free_port()}", {"tls": "off", "steps": 100_000}
    by_hand |= {"checkpoint_every": 5, "reconnect_timeout": 600}
    runs = [
        start(tmp_path, "split_your_model", cluster=name, **{how: where}, **by_hand)
        for name, how in (("back", "listen"), ("front", "peer"))
    ]
    back, front = runs
    folder = tmp_path / "runs" / "split_your_model"
    while not list(folder.glob("front/checkpoints/00000010")):
        assert [each.poll() for each in runs] == [None, None]
        time.sleep(0.01)
    front.kill()
    lines = iter(back.stdout)
    while "waiting for it to come back" not in next(lines):
        pass
    back.send_signal(signal.SIGTERM)
    said = back.communicate(timeout=60)[0]
    assert back.returncode == 128 + signal.SIGTERM, said
    assert "stopped by SIGTERM while it waited for front, whose connection is l" in said
    front.communicate()
    again = start(tmp_path, "split_your_model", **by_hand)
    lines = iter(again.stdout)
    while "going on after step" not in next(lines):
        pass
    again.kill()
    again.communicate()


@pytest.mark.slow  # in one process: tests/face/test_cut.py
def test_a_stopped_chain_is_the_uncut_model_after_the_step_that_all_saved(tmp_path):
    """Each part draws by the key of step and micro-batch; the norm is of all parts."""
    example = chain_of_three
    flags = {"steps": 100_000, "checkpoint_every": 50_000, "log_every": 10}
    # Over a line few steps are done when all stop: rounding errors grow with each.
    run = start(tmp_path, "chain_of_three", wan="100mbit,10ms", **flags)
    for line in run.stdout:
        if "middle" in line and "step" in line:
            break
    run.send_signal(signal.SIGTERM)
    output = run.communicate(timeout=60)[0]
    assert run.returncode == 128 + signal.SIGTERM, output
    folders = (tmp_path / "runs" / "chain_of_three").glob("*/checkpoints")
    steps = [sorted(each.name for each in folder.iterdir()) for folder in folders]
    [[last]] = {tuple(each) for each in steps}  # one checkpoint, the same in all three
    last = int(last)
    # What crosses takes 10 ms on each of two lines, there and back.
    records = metrics.read(tmp_path / "runs" / "chain_of_three" / "middle")
    assert max(each["steps_per_second"] for each in records) < 1.1 / 0.04

    def loss(params, step_and_data):
        step, (points, labels) = step_and_data
        total = 0.0
        for number in range(example.MICRO_BATCHES):
            rng = jax.random.fold_in(jax.random.key(0), step)
            rng = jax.random.fold_in(rng, number)
            h = example.front(params[0], points[number], rng)
            h = example.middle(params[1], h, None, rng)
            total += example.back(params[2], h, labels[number], rng)[0]
        return total / example.MICRO_BATCHES

    begin = [example.init(part) for part in range(3)]
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), example.OPTIMIZER)
    gradients = jax.jit(jax.grad(loss))
    tree, opt_state = begin, optimizer.init(begin)
    for step in range(1, last + 1):
        grads = gradients(tree, (step, example.data(step)[1:]))
        updates, opt_state = optimizer.update(grads, opt_state, tree)
        tree = optax.apply_updates(tree, updates)
    for name, like, one in zip(("front", "middle", "back"), begin, tree, strict=True):
        found = params(tmp_path / "runs" / "chain_of_three", name, last, like)
        trees.assert_close(found, one, atol=1e-3)
