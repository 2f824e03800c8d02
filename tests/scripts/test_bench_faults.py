import random

import pytest

from nebula_jax import errors
from scripts import bench_faults
from scripts.bench_faults import Fault, Sample


def progress(begin, end, step, rate):
    """Samples each second, from `step` on."""
    return [Sample(at, step + rate * (at - begin)) for at in range(begin, end + 1)]


def test_goodput_counts_what_remains_beside_the_rate_between_faults():
    """100 s at 2 steps a second; 20 s and 40 steps are lost by a kill half-way."""
    samples = [*progress(0, 40, 0, 2), *progress(60, 100, 40, 2)]
    found = bench_faults.goodput(samples, [Fault(40.5, 59.5)])
    assert found["rate"] == pytest.approx(2.0)
    assert (found["steps"], found["kills"]) == (120, 1)
    assert found["goodput"] == pytest.approx(120 / 200)


def test_goodput_without_faults_is_one():
    assert bench_faults.goodput(progress(0, 9, 5, 3), [])["goodput"] == 1.0
    with pytest.raises(errors.NebulaError, match="too short a time"):
        bench_faults.goodput(progress(0, 0, 5, 3), [])


def test_the_bridge_recovers_from_a_silent_cut_soon_after_the_line_is_back(monkeypatch):
    monkeypatch.setattr(bench_faults, "CUT_SECONDS", (1.0, 1.0))
    monkeypatch.setattr(bench_faults, "PEER_TIMEOUT", 0.3)
    draw = random.Random(0)
    monkeypatch.setattr(draw, "random", lambda: 0.0)
    (seconds,) = bench_faults.cuts(1, draw)
    assert 0 < seconds < 5
