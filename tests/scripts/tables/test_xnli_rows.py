"""Means over seeds, and two rows compared, with figures worked out by hand."""

import pytest

from scripts.tables import xnli_rows


def test_rows_are_compared_by_seed_and_by_test_row():
    """One test row of four is better in one language of two: an eighth."""
    plain = {"en": "1010", "sw": "1100"}
    better = {"en": "1010", "sw": "1101"}
    found = xnli_rows.compare({"0": better, "1": plain}, {"0": plain, "1": plain})
    assert found["all"]["by_seed"] == [0.125, 0.0]
    assert found["all"]["mean"] == pytest.approx(0.0625)
    assert found["far"]["by_seed"] == [0.25, 0.0]
    # The row comes 0 to 4 times in a draw of four; in 95 % of them at most 3 times.
    low, high = found["far"]["interval"]
    assert low == 0.0
    assert high == pytest.approx(0.125 * 3)
    same = xnli_rows.compare({"0": plain}, {"0": plain})
    assert same["all"]["interval"] == [0.0, 0.0]
