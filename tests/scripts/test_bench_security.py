"""What a federation costs: its parts, run; SECURITY.md has the report of the record."""

import pytest

from scripts import bench_security
from scripts.bench import labs


@pytest.mark.slow
def test_two_labs_connect_and_exchange(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_security, "ROUNDS", 1)
    monkeypatch.setattr(bench_security, "LINES", {"170": "170mbit,15ms"})
    with labs.two_labs(tmp_path) as both:
        found = bench_security.measure_line("170", both)
    assert 0.5 < found["ratio"] < 2.0


@pytest.mark.slow
def test_a_lab_is_revoked_while_the_line_is_full(tmp_path, monkeypatch):
    monkeypatch.setattr(labs, "REVOCATIONS", 2)
    found = labs.revocations(tmp_path)
    assert all(0 < seconds < 15 for seconds in found)
