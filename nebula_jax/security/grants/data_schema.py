"""The part of a corpus that others see without a grant: its schema, and a mock sample.

The schema names columns, their types, the number of rows and the digest of the
vocabulary. The mock sample has the same form with invented values, so that a job can be
written and tried before anybody grants anything. Neither has room for a path.

    {"columns": {"input_ids": "int32[]"}, "rows": 1000000, "vocabulary": "9f86...",
     "about": "News in Spanish, 2019 to 2024."}
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from nebula_jax import errors, printable
from nebula_jax.security.grants import budgets

TYPES = ("bool", "int32", "int64", "float32", "text")
"""The types of a value; with [] behind it, a column has a list of them in each row."""

MOST_COLUMNS = 32
MOST_MOCK_ROWS = 100
MOST_BYTES = 2**16
"""A sample shows the form; more would be a corpus."""
MOST_CHARACTERS = 500  # of `about`

_COLUMN = re.compile(r"[a-z][a-z0-9_]{0,31}")
_DIGEST = re.compile(r"([0-9a-f]{64})?")
_BITS = {"int32": 31, "int64": 63}


class SchemaError(errors.NebulaError):
    """A schema that is none, or a sample that does not have its form."""


class Schema(NamedTuple):
    """The form of a corpus."""

    columns: Mapping[str, str]  # name -> one of TYPES, with [] or not
    rows: int
    vocabulary: str = ""  # SHA-256 in hexadecimal; "" if there are no ids
    about: str = ""  # a line for people


def parse(value: Any) -> Schema:
    """Returns the schema in a value that was read as JSON.

    Raises:
      SchemaError: if a key is missing or not one of ours, or a value is of no use.
    """
    if not isinstance(value, dict):
        raise SchemaError(f"a schema is an object, not {printable.line(value)}")
    if odd := set(value) - set(Schema._fields):
        raise SchemaError(
            f"a schema has no {printable.line(min(odd, key=str))}: it has"
            f" {', '.join(Schema._fields)}"
        )
    if missing := {"columns", "rows"} - set(value):
        raise SchemaError(f"a schema needs {', '.join(sorted(missing))}")
    found = Schema(**value)
    _check_columns(found.columns)
    if type(found.rows) is not int or not 0 < found.rows <= budgets.MOST:
        raise SchemaError(f"a schema has 1 to {budgets.MOST} rows")
    if not isinstance(found.vocabulary, str) or not _DIGEST.fullmatch(found.vocabulary):
        raise SchemaError("a vocabulary's digest has 64 hexadecimal digits")
    about = found.about
    if not isinstance(about, str) or about != printable.line(about, MOST_CHARACTERS):
        raise SchemaError(
            f"about is a line of text of at most {MOST_CHARACTERS} characters"
        )
    return found


def dumps(schema: Schema) -> str:
    """Returns a schema as JSON, in one form for one schema."""
    found = schema._asdict() | {"columns": dict(schema.columns)}
    return json.dumps(found, sort_keys=True)


def loads(text: str) -> Schema:
    """Returns the schema that `dumps` wrote.

    Raises:
      SchemaError: if it is damaged.
    """
    try:
        return parse(json.loads(text))
    except (ValueError, RecursionError):
        raise SchemaError("a schema in the store is damaged") from None


def check_mock(schema: Schema, rows: Sequence[Mapping[str, Any]]) -> str:
    """Checks that a mock sample has the form of a schema.

    Args:
      schema: of the corpus.
      rows: of the sample, each column's name -> its value.

    Returns:
      The sample as JSON.

    Raises:
      SchemaError: if it has another form; names row and column.
    """
    if not isinstance(rows, list | tuple) or not 0 < len(rows) <= MOST_MOCK_ROWS:
        raise SchemaError(f"a mock sample is a list of 1 to {MOST_MOCK_ROWS} rows")
    for number, row in enumerate(rows):
        if not isinstance(row, dict) or set(row) != set(schema.columns):
            raise SchemaError(
                f"row {number} of the mock sample has not the columns"
                f" {', '.join(sorted(schema.columns))}"
            )
        for column, kind in schema.columns.items():
            if not _fits(row[column], kind):
                raise SchemaError(
                    f"row {number} of the mock sample: {column} is no {kind}:"
                    f" {printable.line(repr(row[column]), 60)}"
                )
    try:
        text = json.dumps(rows, allow_nan=False)
    except ValueError:
        raise SchemaError("a mock sample has numbers, no NaN or Inf") from None
    if len(text) > MOST_BYTES:
        raise SchemaError(f"a mock sample has at most {MOST_BYTES} bytes as JSON")
    return text


def _check_columns(columns: Any) -> None:
    if not isinstance(columns, dict) or not 0 < len(columns) <= MOST_COLUMNS:
        raise SchemaError(f"a schema has 1 to {MOST_COLUMNS} columns, name -> type")
    for name, kind in columns.items():
        if not isinstance(name, str) or not _COLUMN.fullmatch(name):
            raise SchemaError(
                f"{printable.line(repr(name))} is no column's name: those have up to 32"
                " small letters, digits and _, as in input_ids"
            )
        if not isinstance(kind, str) or kind.removesuffix("[]") not in TYPES:
            raise SchemaError(
                f"{printable.line(repr(kind))} is no type of column {name}: those are"
                f" {', '.join(TYPES)}, with [] behind it for a list"
            )


def _fits(value: Any, kind: str) -> bool:
    """Returns True if a value is of a column's type."""
    if kind.endswith("[]"):
        inner = kind.removesuffix("[]")
        return isinstance(value, list) and all(_fits(each, inner) for each in value)
    if kind in _BITS:
        return type(value) is int and abs(value) < 2 ** _BITS[kind]
    types = {"bool": (bool,), "float32": (int, float), "text": (str,)}
    return type(value) in types[kind]
