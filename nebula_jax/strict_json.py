"""JSON that every reader takes alike, written and read.

NaN and Inf, which JSON has no word for, are written as null. What is read has none, and
nothing else that two readers may take for two things: a file that limits or admits
something must not mean more than the person who wrote it could see.
"""

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


def loads(data: bytes | bytearray | str) -> Any:
    """Reads JSON in UTF-8; a byte-order mark before it does not count.

    Raises ValueError, in words, if it is none; or has a number that is not finite (a
    bound that is NaN bounds nothing), a name twice in an object (the last would count),
    or more depth than can be read.
    """
    text = data if isinstance(data, str) else data.decode()
    try:
        return _DECODER.decode(text.removeprefix("\ufeff"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no finite number")
    return number


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!a} stands twice in an object")
    return found


_DECODER = json.JSONDecoder(
    parse_float=_finite, parse_constant=_finite, object_pairs_hook=_object
)
