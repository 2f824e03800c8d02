import time

import numpy as np
import pytest

from scripts.ladder import programs, scaling

TREE = {"kernel": np.arange(6, dtype=np.float32).reshape(2, 3), "bias": np.ones(2)}
NET = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets
  eth0: 111 1 0 0 0 0 0 0 222 1 0 0 0 0 0 0
    lo: 3456 20 0 0 0 0 0 0 7890 20 0 0 0 0 0 0
"""


def records(*times):
    return [{"step": n, "time": each, "loss": 2.0} for n, each in enumerate(times, 1)]


def run(seconds, tree=TREE, losses=(2.0, 1.0), sums=None, loopback=None):
    return scaling.Run(seconds, list(losses), tree, sums, loopback)


def test_weak_scaling_is_the_time_of_one_over_that_of_many():
    alone = run([0.52, 0.5, 9.0])
    many = run([0.65, 0.6, 0.65, 0.7], losses=(2.0, 1.25))
    found = scaling.row(4, many, alone, 0.4)
    assert found["efficiency"] == pytest.approx(0.52 / 0.65)
    assert found["exposed"] == pytest.approx((0.65 - 0.52) / 0.65)
    assert found["not_slept"] == pytest.approx(0.25)
    assert found["loss_difference"] == 0.25
    assert found["bytes_program"] is found["all_reduces"] is None
    assert scaling.row(1, alone, alone, 0.4)["efficiency"] == 1


def test_a_ring_of_processes_sends_most_of_the_parameters_twice():
    sums = programs.AllReduces(1, 2, 8 * 4 + 16)
    found = scaling.row(4, run([1.0], sums=sums, loopback=50.0), run([1.0]), 0.0)
    assert found["bytes_formula"] == 2 * 3 / 4 * 8 * 4
    assert found["bytes_program"] == 2 * 3 / 4 * 48
    assert found["bytes_loopback"] == 50
    assert scaling.ring_bytes(100, 1) == 0
    assert scaling.ring_bytes(100, 2) == 100


def test_parameters_are_compared_bit_for_bit_and_by_the_largest_difference():
    other = {"kernel": TREE["kernel"].copy(), "bias": TREE["bias"] - 0.5}
    other["kernel"][1, 2] += 0.25
    assert scaling.equality(TREE, other) == {"difference": 0.5, "equal": 5 / 8}
    assert scaling.equality(TREE, TREE) == {"difference": 0.0, "equal": 1.0}


def test_neither_the_first_steps_nor_the_last_are_timed():
    """In the first a process compiles, after the last it evaluates and saves."""
    found = scaling.step_seconds(records(0.0, 30.0, 31.0, 33.0, 90.0))
    assert found == [1.0, 2.0]


def test_bytes_are_those_between_two_records_shared_by_the_processes():
    samples = [(0.0, 5), (29.9, 1000), (30.1, 1100), (31.5, 1500), (33.0, 2000)]
    samples += [(33.1, 2200), (90.0, 9999)]
    steps = records(0.0, 30.0, 31.0, 33.0, 90.0)
    assert scaling.sent(samples, steps, 2) == (2000 - 1000) / 2 / 2
    assert scaling.sent(samples, steps, 1) is None
    assert scaling.sent([], steps, 2) is None


def test_the_kernels_counter_of_loopback_is_read():
    assert scaling.loopback_bytes(NET) == 7890
    with pytest.raises(ValueError, match="no loopback"):
        scaling.loopback_bytes(NET.replace("lo:", "eth1:"))


def test_loopback_is_sampled_meanwhile(tmp_path, monkeypatch):
    path = tmp_path / "dev"
    path.write_text(NET)
    monkeypatch.setattr(scaling, "COUNTERS", path)
    monkeypatch.setattr(scaling, "POLL_SECONDS", 0.001)
    with scaling.counted() as samples:
        while not samples:
            time.sleep(0.001)
    assert {count for _, count in samples} == {7890}
    monkeypatch.setattr(scaling, "COUNTERS", tmp_path / "none")
    with scaling.counted() as samples:
        assert samples == []


def test_the_step_is_the_program_that_adds_up_most(tmp_path):
    def write(name, values):
        line = f"  %s = f32[{values}]{{0}} all-reduce(%x), to_apply=%add\n"
        (tmp_path / name).write_text(
            f"ENTRY %main (x: f32[1]) -> f32[1] {{\n{line}}}\n"
        )

    write("module_1.jit_agree.cpu_after_optimizations.txt", 3)
    write("module_2.jit_step.cpu_after_optimizations.txt", 50)
    write("module_3.jit_step.before_optimizations.txt", 70)
    assert scaling.largest(tmp_path) == (1, 0, 200)
    assert scaling.largest(tmp_path / "none") is None


def test_a_program_is_compiled_and_not_read_where_it_is_to_be_written(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "cache")
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1")
    found = scaling.environment(tmp_path)
    assert "JAX_COMPILATION_CACHE_DIR" not in found
    assert found["JAX_PLATFORMS"] == "cpu"  # processes cannot share a GPU
    assert found["XLA_FLAGS"].split() == [
        *("--xla_a=1", f"--xla_dump_to={tmp_path}", "--xla_dump_hlo_as_text"),
    ]
    assert scaling.environment(None)["XLA_FLAGS"] == "--xla_a=1"
