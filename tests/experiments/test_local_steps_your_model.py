"""The examples of local steps: an all-reduce where they should be, and what crosses."""

import json
import signal
import time

import jax
import numpy as np
import optax
import pytest
import trees
from example_runs import ended, params, start, train_here

import nebula_jax as nebula
from experiments import adapters_your_model, local_steps_your_model


@pytest.mark.slow  # in one process: tests/runtime/test_local_steps.py
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
    """Plain SGD that is averaged at every step is that of the joint batch."""
    example = adapters_your_model
    settings = {"inner_steps": 1, "learning_rate": 1.0, "momentum": 0.0, "codec": ""}
    monkeypatch.setattr(example, "OPTIMIZER", optax.sgd(0.1))
    monkeypatch.setattr(example, "SETTINGS", settings)
    names = ("replica:0", "replica:1")
    train_here(dict.fromkeys(names, example.train), tmp_path, steps=4)
    begin = example.params()
    state = nebula.state(begin, optax.sgd(0.1), is_trained=example.is_trained)
    for step in range(1, 5):
        _, grads = example.loss_and_grads(state.params, example.batch(step))
        state = state.apply(grads)
    for k in range(2):
        found = params(tmp_path, f"replica-{k}", 4, begin)
        trees.assert_close(found, state.params, atol=1e-6)
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
