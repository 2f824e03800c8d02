"""The text of a plan."""

import pytest

from scripts.plans import text


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, "0"),
        (42, "42"),
        (999.4, "999"),
        (999.7, "1 k"),
        (1000, "1 k"),
        (999_499, "999 k"),
        (999_999, "1 M"),
        (278_292_882, "278 M"),
        (999_600_000, "1 G"),
        (1.5e15, "1.5 P"),
    ],
)
def test_a_count_has_the_unit_of_its_rounded_value(value, expected):
    assert text.number(value) == expected
