import pytest
from absl.testing import flagsaver

from nebula_jax.parallel.planner import Compute
from nebula_jax.runtime import report
from scripts import bench_planner

M3 = {"generators": Compute(0.03, 0.0), "discriminator": Compute(0.05, 0.0)}
ABNET = {"source": Compute(0.1, 0.2, 0.05), "target": Compute(0.4, 0.0, 0.05)}


def predict(case, fitted):
    with flagsaver.flagsaver():
        return bench_planner.predict(case, fitted)


def test_the_run_that_was_fitted_is_predicted_as_the_sum_of_its_parts():
    found = predict(bench_planner.FITTED["m3"], M3)
    assert found == pytest.approx(0.08, rel=0.01)
    found = predict(bench_planner.FITTED["abnet"], ABNET)
    assert found == pytest.approx(0.1 + 0.4 + 0.2 + 0.05, rel=0.1)


def test_flags_processes_and_the_line_change_a_prediction():
    named = {case.what: case for case in bench_planner.PREDICTED}
    turns = predict(named["taking turns, 60 Mbit/s"], M3)
    assert turns == pytest.approx(0.08 + 0.03, rel=0.05)  # and a round trip of 30 ms
    assert predict(named["window 2, 60 Mbit/s"], M3) == pytest.approx(0.05, rel=0.05)
    slow = predict(named["window 2, 0.05 Mbit/s"], M3)
    assert slow > 0.25  # 1.8 kB at 6.25 kB/s
    wide = predict(named["four, int4 both ways, 2 Mbit/s"], ABNET)
    assert wide > predict(named["four micro-batches, no line"], ABNET)
    halved = predict(named["taking turns, 2 processes"], M3)
    assert halved == pytest.approx(0.04, rel=0.05)


def test_enough_runs_of_both_scenarios_are_predicted():
    cases = bench_planner.PREDICTED
    assert len(cases) >= 8
    assert {case.experiment for case in cases} == {"m3", "abnet"}
    assert {case.processes for case in cases} == {1, 2}
    assert not set(cases) & set(bench_planner.FITTED.values())


def test_the_report_counts_what_is_within_15_percent():
    row = {"experiment": "m3", "what": "x", "measured": 0.1, "is_fitted": False}
    rows = [
        {**row, "predicted": 0.1, "is_fitted": True},
        {**row, "predicted": 0.114},
        {**row, "predicted": 0.2},
    ]
    text = bench_planner.markdown(report.provenance(1.0) | {"rows": rows})
    assert "| m3 | x | 100 | 114 | +14% |" in text
    assert "1 of 2 predictions are within 15% of what was measured." in text
