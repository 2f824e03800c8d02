"""Selection on English dev, against its definition."""

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_nli

from experiments.xnli import config, selection

ACCURACIES = {2: 0.4, 4: 0.6, 6: 0.5, 8: 0.6, 10: 0.7, 12: 0.1}  # 4 and 8 are equal


@pytest.fixture
def agreed(tmp_path):
    def make(rule, **values):
        run = tiny_nli.run_in(tmp_path, checkpoint_selection=rule, **values)
        return run.agreed

    return make


def params_of(step):
    """Parameters after a step."""
    return {"w": jnp.full(3, step, jnp.float32)}


def selections(agreed):
    """The selection after each evaluation of a run."""
    found = [selection.restored(params_of(0), None)]
    for step, accuracy in ACCURACIES.items():
        params = params_of(step)
        found.append(selection.select(agreed, found[-1], step, accuracy, params))
    return found[1:]


def test_best_is_the_earliest_of_equals(agreed):
    found = selections(agreed("best"))
    assert [each.step for each in found] == [2, 4, 4, 4, 10, 10]
    for each in found:
        assert float(each.params["w"][0]) == each.step
    assert dict(found[-1].curve) == ACCURACIES


def test_last_is_the_last_however_bad(agreed):
    found = selections(agreed("last"))
    assert [each.step for each in found] == list(ACCURACIES)
    assert float(found[-1].params["w"][0]) == 12


@pytest.mark.parametrize("rule", ["best", "last"])
def test_selected_parameters_are_copies(agreed, rule):
    """The next step uses its state up, and a selection outlives it."""
    params = params_of(1)
    before = selection.restored(params_of(0), None)
    after = selection.select(agreed(rule), before, 1, 0.5, params)
    assert after.params["w"] is not params["w"]
    params["w"].delete()
    np.testing.assert_array_equal(after.params["w"], np.ones(3))
    assert before == selection.Selection(0, before.params)


def test_a_selection_goes_into_a_checkpoint_and_comes_back(agreed):
    last = selections(agreed("best"))[-1]
    again = selection.restored(last.params, last.position)
    assert (again.step, again.curve) == (last.step, last.curve)
    assert again.params is last.params


def test_epochs_make_steps(tmp_path):
    run = tiny_nli.run_in(tmp_path, epochs=0.5, steps=7)
    assert config.with_epochs(run, 12).agreed.steps == 6
    assert config.with_epochs(run, 1).agreed.steps == 1
    given = tiny_nli.run_in(tmp_path, steps=7)
    assert config.with_epochs(given, 12) is given
