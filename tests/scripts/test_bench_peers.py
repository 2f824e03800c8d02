"""The benchmark of frameworks: its task, one trial, its tables."""

import dataclasses
import functools
import math
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from absl import flags

from nebula_jax import errors
from nebula_jax.runtime.records import report
from scripts import bench_peers
from scripts.peers import sites as sites_lib
from scripts.peers import task as task_lib
from scripts.peers import translator, trials, with_nebula
from scripts.tables import runs as table_runs

SIZE = task_lib.Size(width=16, rounds=3, inner_steps=12, batch=8)


@pytest.fixture
def task(tmp_path):
    np.save(tmp_path / "text.npy", trials.text())
    return task_lib.Task(**dataclasses.asdict(SIZE), folder=str(tmp_path))


@pytest.fixture
def here(monkeypatch):
    """Both sites are this machine: neither root nor a line."""

    class Here(sites_lib.Site):
        def command(self, arguments):
            return list(arguments)

        def processes(self):
            return psutil.Process().children(recursive=True)

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
    arm = trials.Arm("with_nebula", variant=variant)
    start = functools.partial(trials.running, arm, pathlib.Path(sys.executable))
    with start(SIZE, None) as trial:
        found = bench_peers.measured(trial)
    assert found["loss"] < 6
    assert min(found["bytes"], found["round"], found["computing"]) > 0
    assert found["memory"] > 50
    with start(dataclasses.replace(SIZE, rounds=10_000), None) as trial:
        assert 0 < bench_peers.recovery(trial) < trials.LONGEST_SECONDS


@pytest.mark.slow
def test_two_parts_train_and_their_loss_is_that_of_the_target(here):
    arm = trials.Arm("cut_with_nebula", variant="int4")
    size = task_lib.Size(width=translator.WIDTH, rounds=3, inner_steps=1, batch=32)
    with trials.running(arm, pathlib.Path(sys.executable), size, None) as trial:
        found = bench_peers.measured(trial)
    assert 1 < found["loss"] < 10
    assert "computing" not in found


@pytest.mark.parametrize(
    ("python", "words"), [(sys.executable, ".*with_nothing"), ("/bin/true", "$")]
)
def test_a_worker_that_ends_without_a_loss_ends_the_trial(here, python, words):
    arm = trials.Arm("with_nothing")
    with (
        trials.running(arm, pathlib.Path(python), SIZE, None) as trial,
        pytest.raises(errors.NebulaError, match=f"worker [01] ended: {words}"),
    ):
        bench_peers.measured(trial)


def test_a_row_is_measured_once_and_one_that_fails_says_why(tmp_path, monkeypatch):
    for name, value in (("sizes", ["the cut"]), ("lines", ["none"])):
        monkeypatch.setattr(flags.FLAGS[name], "value", value)
    done, failing = [], {"torch pipelining float32"}

    def execute(run, workdir):
        size, line, arm = (each.partition("=")[2] for each in run.arguments[:3])
        done.append(arm)
        if arm in failing:
            raise errors.NebulaError("there is no environment torch")
        row = {"model": size, "line": line, "arm": arm, "round": 1.0}
        report.write(workdir / "summary.json", report.provenance(1.0) | {"row": row})

    def record():
        runs = table_runs.Runs(tmp_path, table_runs.summary_of, execute)
        return bench_peers.record(runs, None)["rows"]

    assert record()[-1]["reason"] == "there is no environment torch"
    assert len(done) == len(bench_peers.CUT)
    failing.clear()
    assert [row["round"] for row in record()] == [1.0] * 4
    assert done[4:] == ["torch pipelining float32"]
