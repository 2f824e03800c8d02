import json

import numpy as np
import pytest

from nebula_jax import strict_json

NAN, INF = float("nan"), float("inf")


def test_what_json_has_no_word_for_is_null_at_any_depth():
    value = {"a": NAN, "b": [1, -INF, ("x", np.float64(INF))], "c": {"d": {"e": NAN}}}
    text = strict_json.dumps(value, indent=1)
    found = json.loads(text, parse_constant=pytest.fail)
    assert found == {"a": None, "b": [1, None, ["x", None]], "c": {"d": {"e": None}}}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"bytes": NaN}', "NaN is no finite number"),
        ("[-Infinity]", "-Infinity is no finite number"),
        ("[1e999]", "1e999 is no finite number"),
        ('{"a": {"b": 1, "c": 2, "b": 3}}', "'b' stands twice in an object"),
        ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
        ('{"a": ' * 100_000 + "1" + "}" * 100_000, "nested too deeply"),
        ("1" * 5000, "digits"),
        ("{", "Expecting"),
        ("", "Expecting"),
        (b"\xff", "utf-8"),
        ('"a"'.encode("utf-16"), "utf-8"),
    ],
)
def test_what_two_readers_may_read_as_two_things_is_refused(text, reason):
    with pytest.raises(ValueError, match=reason):
        strict_json.loads(text)


@pytest.mark.parametrize(
    "make", [str, str.encode, lambda text: bytearray(text.encode())]
)
def test_other_text_is_read_as_json_reads_it_with_a_mark_before_it_or_not(make):
    text = '{"a": [1, 2.5e3, "\u00fc", null, true], "b": {"a": -0.0}}'
    assert strict_json.loads(make(text)) == json.loads(text)
    assert strict_json.loads(make("\ufeff" + text)) == json.loads(text)


def test_other_values_are_written_as_json_writes_them():
    value = {"a": [1, 2.5, "ü", None, True], "b": ()}
    assert strict_json.dumps(value, indent=1) == json.dumps(value, indent=1)
