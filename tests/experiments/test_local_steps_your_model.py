"""The examples of local steps: an all-reduce where they should be, and what crosses."""

import json
import signal
import time

import jax
import numpy as np
import optax
import pytest
from example_runs import assert_near, ended, params, start, train_here

import nebula_jax as nebula
from experiments import adapters_your_model, local_steps_your_model


def train_averaged(monkeypatch, example, folder, replicas, steps):
    """Trains with plain SGD that is averaged every step."""
    settings = {"inner_steps": 1, "learning_rate": 1.0, "momentum": 0.0, "codec": ""}
    monkeypatch.setattr(example, "OPTIMIZER", optax.sgd(0.1))
    monkeypatch.setattr(example, "SETTINGS", settings)
    names = [f"replica:{k}" for k in range(replicas)]
    train_here(dict.fromkeys(names, example.train), folder, steps=steps)


def whole(example, state, steps):
    """Trains on the batches of all replicas, in this process."""
    for step in range(1, steps + 1):
        _, grads = example.loss_and_grads(state.params, example.batch(step))
        state = state.apply(grads)
    return state.params


@pytest.mark.slow  # of two replicas' adapters it is below
def test_three_replicas_averaged_every_step_are_an_all_reduce(tmp_path, monkeypatch):
    example = local_steps_your_model
    train_averaged(monkeypatch, example, tmp_path, replicas=3, steps=6)
    expected = whole(example, nebula.state(example.PARAMS, optax.sgd(0.1)), 6)
    found = [params(tmp_path, f"replica-{k}", 6, example.PARAMS) for k in range(3)]
    for each in found:
        assert_near(each, expected, 1e-6)
        jax.tree.map(np.testing.assert_array_equal, each, found[0])


@pytest.mark.slow  # of BERT's clusters it is in every run of the tests
def test_replicas_that_are_stopped_go_on_bit_for_bit(tmp_path):
    example, name = local_steps_your_model, "local_steps_your_model"
    flags = {"checkpoint_every": 20, "log_every": 20}
    whole_run, parts = tmp_path / "whole", tmp_path / "parts"
    whole_run.mkdir()
    parts.mkdir()
    ended(start(whole_run, name, steps=60, **flags))
    run = start(parts, name, steps=60, **flags)
    saved = parts / "runs" / name / "replica-1" / "checkpoints" / "00000020"
    while run.poll() is None and not saved.exists():
        time.sleep(0.02)
    run.send_signal(signal.SIGTERM)
    run.communicate(timeout=120)
    newest = {
        max((parts / "runs" / name / each / "checkpoints").glob("[0-9]" * 8)).name
        for each in ("replica-0", "replica-1")
    }
    assert len(newest) == 1  # all have stopped after the same step
    ended(start(parts, name, steps=60, **flags))
    one, two = (
        params(each / "runs" / name, "replica-1", 60, example.PARAMS)
        for each in (whole_run, parts)
    )
    jax.tree.map(np.testing.assert_array_equal, one, two)


def test_nothing_but_adapters_crosses(tmp_path, monkeypatch):
    example = adapters_your_model
    train_averaged(monkeypatch, example, tmp_path, replicas=2, steps=4)
    begin = example.params()
    state = nebula.state(begin, optax.sgd(0.1), is_trained=example.is_trained)
    expected = whole(example, state, 4)
    for k in range(2):
        found = params(tmp_path, f"replica-{k}", 4, begin)
        assert_near(found, expected, 1e-6)
        jax.tree.map(np.testing.assert_array_equal, found["frozen"], begin["frozen"])
        summary = json.loads((tmp_path / f"replica-{k}" / "summary.json").read_text())
        (ledger,) = summary["ledger"].values()
        sent = {kind: size for kind, (_, size) in ledger.items() if "sent " in kind}
        deltas = sum(size for kind, size in sent.items() if "delta" in kind)
        lora = sum(leaf.nbytes for leaf in jax.tree.leaves(begin["lora"]))
        # Four rounds of the adapters, each with its head, and the digest of the end.
        assert 4 * lora < deltas < 4 * lora + 2000
        # Greetings, of which the longest lists all channels; the model is 1 MiB.
        assert sum(sent.values()) - deltas < 10_000
