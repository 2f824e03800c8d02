"""JSON that every reader takes: NaN and Inf, which it has no word for, become null."""

import json
import math
from collections.abc import Mapping
from typing import Any


def dumps(value: Any, **options: Any) -> str:
    """Writes a value as JSON; `options` are those of `json.dumps`.

    >>> dumps({"loss": float("nan"), "auc": {"en": 0.5}})
    '{"loss": null, "auc": {"en": 0.5}}'
    """
    return json.dumps(_without_nonfinite(value), allow_nan=False, **options)


def _without_nonfinite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nonfinite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nonfinite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
