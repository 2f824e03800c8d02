"""The form of a corpus, which everybody sees: no path fits into it."""

import re

import pytest
from tiny_accounts import MOCK, PATH, SCHEMA

from nebula_jax.security.grants import data_schema
from nebula_jax.security.grants.data_schema import Schema, SchemaError

ROW = {"input_ids": [1], "label": 0}


def test_a_schema_comes_back_as_it_was():
    assert data_schema.loads(data_schema.dumps(SCHEMA)) == SCHEMA
    short = data_schema.parse({"columns": {"text": "text"}, "rows": 5})
    assert short == Schema({"text": "text"}, 5, "", "")
    assert data_schema.check_mock(short, [{"text": "é"}]) == r'[{"text": "\u00e9"}]'


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"path": PATH}, "a schema has no path: it has columns, rows, vocabulary"),
        ({"columns": {}}, "1 to 32 columns"),
        ({"columns": [["a", "int32"]]}, "1 to 32 columns"),
        ({"columns": {f"c{n}": "int32" for n in range(33)}}, "1 to 32 columns"),
        ({"columns": {PATH: "int32"}}, "is no column's name"),
        ({"columns": {"a": "object"}}, "is no type of column a"),
        ({"columns": {"a": "int32[][]"}}, "is no type of column a"),
        ({"columns": {"a": ["int32"]}}, "is no type of column a"),
        ({"rows": 0}, "1 to 9007199254740992 rows"),
        ({"rows": True}, "1 to 9007199254740992 rows"),
        ({"rows": 1e6}, "1 to 9007199254740992 rows"),
        ({"vocabulary": PATH}, "64 hexadecimal digits"),
        ({"vocabulary": None}, "64 hexadecimal digits"),
        ({"about": "two\nlines"}, "a line of text"),
        ({"about": "a" * 501}, "a line of text"),
        ({"about": "\x1b[2J"}, "a line of text"),
    ],
)
def test_what_is_no_schema(change, words):
    with pytest.raises(SchemaError, match=re.escape(words)):
        data_schema.parse(SCHEMA._asdict() | change)


@pytest.mark.parametrize("value", [None, [], "schema", {"rows": 1}, {1: 2}])
def test_what_is_no_object_of_a_schema(value):
    with pytest.raises(SchemaError):
        data_schema.parse(value)


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 10**5, '{"rows": 1}'])
def test_a_damaged_schema(text):
    with pytest.raises(SchemaError):
        data_schema.loads(text)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "a list of 1 to 100 rows"),
        ("rows", "a list of 1 to 100 rows"),
        ([ROW] * 101, "a list of 1 to 100 rows"),
        ([*MOCK, {"input_ids": [1]}], "row 2 of the mock sample has not the columns"),
        ([ROW | {"path": PATH}], "row 0 of the mock sample has not the columns"),
        ([[1, 2]], "row 0 of the mock sample has not the columns"),
        ([ROW | {"label": "zero"}], "row 0 of the mock sample: label is no int32"),
        ([ROW | {"label": True}], "label is no int32: True"),
        ([ROW | {"label": 2**31}], "label is no int32"),
        ([ROW | {"input_ids": 1}], "input_ids is no int32[]"),
        ([ROW | {"input_ids": [1, "a"]}], "input_ids is no int32[]"),
        ([ROW | {"input_ids": list(range(20_000))}], "at most 65536 bytes as JSON"),
    ],
)
def test_a_sample_of_another_form(rows, words):
    with pytest.raises(SchemaError, match=re.escape(words)):
        data_schema.check_mock(SCHEMA, rows)


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("bool", [True], [1, "true", None]),
        ("int64", [2**63 - 1, -5], [2**63, 1.0, False]),
        ("float32", [0.5, 3], ["0.5", True, None]),
        ("float32", [], [float("nan"), float("inf")]),
        ("text", ["", "é"], [1, b"bytes", None]),
        ("text[]", [["a", "b"], []], ["ab", [1], None]),
    ],
)
def test_types(kind, good, bad):
    schema = Schema({"a": kind}, 1)
    for value in good:
        data_schema.check_mock(schema, [{"a": value}])
    for value in bad:
        with pytest.raises(SchemaError):
            data_schema.check_mock(schema, [{"a": value}])
