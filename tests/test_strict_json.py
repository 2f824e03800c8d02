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


def test_other_values_are_written_as_json_writes_them():
    value = {"a": [1, 2.5, "ü", None, True], "b": ()}
    assert strict_json.dumps(value, indent=1) == json.dumps(value, indent=1)
