"""Fine-tuning in this process, with a loss that is NaN once."""

import json
import signal

import jax.numpy as jnp
import pytest
import tiny_nli

from experiments.xnli import train
from nebula_jax.runtime.records import progress
from nebula_jax.training import state as train_state


@pytest.fixture
def signals():
    """Puts back the handlers of signals, which a run takes."""
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("signals")
def test_a_loss_that_is_nan_ends_the_run_or_is_skipped(tmp_path, monkeypatch, capsys):
    """First the one, then the other: the same command goes on with more leave."""
    tiny_nli.write_text(tmp_path / "text")
    tiny_nli.write_model(tmp_path / "models" / "bert", layers=1)
    apply = train_state.TrainState.apply_gradients

    def planted(state, grads, optimizer, metrics):
        loss = jnp.where(state.step == 7, jnp.nan, metrics["loss"])
        return apply(state, grads, optimizer, metrics | {"loss": loss})

    monkeypatch.setattr(train_state.TrainState, "apply_gradients", planted)
    words = "^finetune: the loss of step 8 is nan; nothing after it is saved"
    given = {"length_buckets": "16", "eval_every": 6}  # one shape is soon compiled
    with pytest.raises(progress.NonfiniteError, match=words):
        train.train(tiny_nli.run_in(tmp_path, **given))
    folder = tmp_path / "run" / "finetune"
    saved = [path.name for path in (folder / "checkpoints").iterdir()]
    assert {"00000003", "00000006"} <= set(saved)
    assert "00000009" not in saved
    assert not (folder / "summary.json").exists()

    assert train.train(tiny_nli.run_in(tmp_path, **given, allow_nonfinite=1)) == 0
    printed = capsys.readouterr()
    assert "going on after step 6" in printed.err
    assert "finetune: the loss of step 8 is nan: skipped, 1 of 1" in printed.err
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["last_step"], summary["skipped_steps"]) == (12, 1)
    assert "NaN" not in (folder / "metrics.jsonl").read_text()
