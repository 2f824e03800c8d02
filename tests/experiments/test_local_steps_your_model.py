"""The examples of local steps: an all-reduce where they should be, and what crosses."""

import json

import jax
import numpy as np
import optax
import trees
from example_runs import params, train_here

import nebula_jax as nebula
from experiments import adapters_your_model


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
