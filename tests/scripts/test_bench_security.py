"""The report of what a federation costs; its measuring is done by hand."""

import pytest

from scripts import bench_security
from scripts.bench import labs, revocations

ROW = {
    "mbit": "60",
    "kilobytes": 256,
    "plain": 0.08,
    "federated": 0.0808,
    "ratio": 1.01,
    "switch_cores": 0.05,
    "trainer_cores": 0.002,
}


def test_the_report_has_what_is_more_and_the_share_of_a_core():
    text = bench_security.markdown(
        {
            "command": "c",
            "commit": "a",
            "hardware": {"cpu": "x", "cores": 2, "python": "3", "jax": "0"},
            "seconds": 60.0,
            "rounds": 5,
            "install_to_secure_seconds": 9.0,
            "rows": [ROW],
            "revocation_seconds": [0.1] * 98 + [0.3, 0.5],
        }
    )
    row = "| 60 Mbit/s, 256 kB each way | 80.0 | 80.8 | +1.0% | 5.0% | +0.2% |"
    assert row in text
    assert "0.10 s (median), 0.30 s (99 of 100), of 100 revocations" in text


@pytest.mark.slow
def test_two_labs_connect_and_exchange(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_security, "ROUNDS", 1)
    monkeypatch.setattr(bench_security, "LINES", {"170": "170mbit,15ms"})
    with labs.two_labs(tmp_path) as both:
        found = bench_security.measure_line("170", both)
    assert 0.5 < found["ratio"] < 2.0


@pytest.mark.slow
def test_a_lab_is_revoked_while_the_line_is_full(tmp_path, monkeypatch):
    monkeypatch.setattr(revocations, "REVOCATIONS", 2)
    found = revocations.measure(tmp_path)
    assert all(0 < seconds < 15 for seconds in found)
