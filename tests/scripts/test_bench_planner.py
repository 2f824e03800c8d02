import pytest
from absl.testing import flagsaver

from nebula_jax.parallel.planner import Compute
from nebula_jax.runtime.records import report
from scripts import bench_planner

M3 = {
    "generators": Compute(0.03, 0.0, cores=1.0),
    "discriminator": Compute(0.05, 0.0, cores=2.0),
}
ABNET = {
    "source": Compute(0.1, 0.2, 0.05, 2.0),
    "target": Compute(0.4, 0.0, 0.05, 2.0),
}
TRIP = 0.03  # seconds on the line there and back, beside its bytes


def predict(case, fitted):
    with flagsaver.flagsaver():
        return bench_planner.predict(case, fitted)


def test_the_run_that_was_fitted_is_predicted_as_the_sum_of_its_parts():
    found = predict(bench_planner.FITTED["m3"], M3)
    assert found == pytest.approx(0.08, rel=0.01)
    found = predict(bench_planner.FITTED["abnet"], ABNET)
    on_the_line = 2 * 8 * 787_000 / 60e6  # 16 rows of 32 tokens, 384 wide
    assert found == pytest.approx(0.75 + TRIP + on_the_line, rel=0.07)


def test_flags_processes_and_the_line_change_a_prediction():
    named = {(case.experiment, case.what): case for case in bench_planner.PREDICTED}

    def m3(what):
        return predict(named["m3", what], M3)

    assert m3("taking turns, 60 Mbit/s") == pytest.approx(0.08 + TRIP, rel=0.01)
    # Two cores, of which one process leaves one idle.
    assert m3("window 2, 60 Mbit/s") == pytest.approx((0.03 + 2 * 0.05) / 2, rel=0.05)
    assert m3("window 2, 0.05 Mbit/s") > 0.25  # 1.8 kB at 6.25 kB/s
    assert m3("fan-out 3, 60 Mbit/s") == pytest.approx(3 * 0.065, rel=0.1)
    line, none = (
        predict(named["abnet", f"one micro-batch, {line}"], ABNET)
        for line in ("10 Mbit/s", "no line")
    )
    # But for what the target computes while its gradients are on the line.
    assert line - none == pytest.approx(2 * 8 * 787_000 / 10e6 + TRIP, rel=0.05)


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
