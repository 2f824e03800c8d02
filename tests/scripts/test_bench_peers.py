"""The benchmark of frameworks: its task, one trial, its tables."""

import math
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nebula_jax import errors
from nebula_jax.runtime.records import report
from scripts import bench_peers
from scripts.peers import sites as sites_lib
from scripts.peers import task as task_lib
from scripts.peers import trials, with_nebula

SIZE = trials.Size(width=16, rounds=3, inner_steps=12, batch=8)


@pytest.fixture
def task(tmp_path):
    np.save(tmp_path / "text.npy", trials.text())
    more = {"host": "", "root": "", "device": "", "folder": str(tmp_path)}
    return task_lib.Task(worker=0, **SIZE._asdict(), **more)


@pytest.fixture
def here(monkeypatch):
    """Both sites are this machine: neither root nor a line."""

    class Here(sites_lib.Site):
        def command(self, arguments):
            return list(arguments)

    class Line:
        def __enter__(self):
            return [Here(name, "127.0.0.1", "lo", 0) for name in "ab"]

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(sites_lib, "joined", lambda megabits: Line())


def test_workers_begin_alike_and_take_other_batches_always_the_same(task):
    other = task_lib.Task(**vars(task) | {"worker": 1})
    for name, value in task.parameters().items():
        np.testing.assert_array_equal(value, other.parameters()[name])
    assert task.rows(1).shape == (SIZE.batch, task_lib.CONTEXT + 1)
    np.testing.assert_array_equal(task.rows(5), task.rows(5))
    assert not np.array_equal(task.rows(5), task.rows(6))
    assert not np.array_equal(task.rows(5), other.rows(5))


def test_nobody_trains_on_held_out_text(task):
    path = pathlib.Path(task.folder, "text.npy")
    np.save(path, np.arange(len(np.load(path))))  # so that each place is told by itself
    trained = np.concatenate([task.rows(step) for step in range(1, 200)])
    assert task.held_out().max() < trained.min()


def test_the_model_of_jax_is_that_of_numpy(task):
    params = task.parameters()
    rows = task.rows(1)
    x = params["embedding"][rows[:, :-1]].reshape(len(rows), -1)
    for name in ("first", "second"):
        x = x @ params[name] + params[f"{name}_bias"]
        x = x * 0.5 * (1 + np.vectorize(math.erf)(x / np.sqrt(2)))
    logits = x @ params["head"] + params["head_bias"]
    expected = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(rows)), rows[:, -1]]
    found = with_nebula.loss_of(jax.tree.map(jnp.asarray, params), rows)
    np.testing.assert_allclose(found, expected.mean(), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("variant", list(with_nebula.VARIANTS))
def test_two_workers_train_and_one_that_is_killed_comes_back(here, variant):
    arm, python = (
        trials.Arm("with_nebula", variant=variant),
        pathlib.Path(sys.executable),
    )
    with trials.running(arm, python, SIZE, None) as trial:
        found = bench_peers.measured(trial)
    assert found["loss"] < 6
    assert min(found["bytes"], found["round"]) > 0
    assert found["memory"] > 50
    endless = SIZE._replace(rounds=10_000)
    with trials.running(arm, python, endless, None) as trial:
        assert 0 < bench_peers.recovery(trial) < trials.LONGEST_SECONDS


def test_a_worker_that_fails_ends_the_trial_with_its_last_words(here):
    arm, python = trials.Arm("with_nothing"), pathlib.Path(sys.executable)
    with (
        trials.running(arm, python, SIZE, None) as trial,
        pytest.raises(errors.NebulaError, match=r"worker 0 ended: .*with_nothing"),
    ):
        bench_peers.measured(trial)


def test_a_table_has_the_shortest_round_first_and_a_dash_for_what_is_not_there():
    figures = {"computing": 1.0, "bytes": 1e6, "loss": 2.5, "memory": 200.0}
    about = {"model": "1 M", "line": "60 Mbit/s"}
    rows = [
        about | figures | {"arm": "slow", "round": 9.0, "recovery": 3.0},
        about | {"arm": "absent", "reason": "there is no environment torch"},
        about | figures | {"arm": "fast", "round": 2.0},
    ]
    text = bench_peers.markdown(report.provenance(1.0) | {"rows": rows})
    assert text.index("| fast | 2.00 s") < text.index("| slow | 9.00 s")
    assert "| 3.0 s |" in text
    assert "| absent | – | – | – | – | – | – |" in text
    assert "absent: there is no environment torch." in text
