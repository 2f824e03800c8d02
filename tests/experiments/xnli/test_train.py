"""Fine-tuning in this process, with a loss that is NaN once; selection on dev."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_nli

from experiments.xnli import train
from nebula_jax.runtime.records import progress
from nebula_jax.training import state as train_state


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


ACCURACIES = {2: 0.4, 4: 0.6, 6: 0.5, 8: 0.6, 10: 0.7, 12: 0.1}  # 4 and 8 are equal


def params_of(step):
    return {"w": jnp.full(3, step, jnp.float32)}


def selections(rule):
    """The selection after each evaluation of a run."""
    found = [train.restored_selection(params_of(0), None)]
    for step, accuracy in ACCURACIES.items():
        params = params_of(step)
        found.append(found[-1].after(rule, step, accuracy, params))
    return found[1:]


def test_best_is_the_earliest_of_equals():
    found = selections("best")
    assert [each.step for each in found] == [2, 4, 4, 4, 10, 10]
    for each in found:
        assert float(each.params["w"][0]) == each.step
    assert dict(found[-1].curve) == ACCURACIES


def test_last_is_the_last_however_bad():
    found = selections("last")
    assert [each.step for each in found] == list(ACCURACIES)
    assert float(found[-1].params["w"][0]) == 12


def test_selected_parameters_are_copies():
    """The next step uses its state up, and a selection outlives it."""
    params = params_of(1)
    before = train.restored_selection(params_of(0), None)
    after = before.after("best", 1, 0.5, params)
    assert after.params["w"] is not params["w"]
    params["w"].delete()
    np.testing.assert_array_equal(after.params["w"], np.ones(3))
    assert before == train.Selection(0, before.params)


def test_a_selection_goes_into_a_checkpoint_and_comes_back():
    last = selections("best")[-1]
    again = train.restored_selection(last.params, last.position)
    assert (again.step, again.curve) == (last.step, last.curve)
    assert again.params is last.params
