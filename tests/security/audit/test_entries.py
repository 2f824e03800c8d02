"""One line an entry, whatever somebody puts into it, and no secrets."""

import datetime
import math
import pathlib

import hypothesis
import pytest
from hypothesis import strategies as st

from nebula_jax.security import audit
from nebula_jax.security.audit import entries as audit_entries

AFTER, SALT = bytes(range(32)), bytes(range(16))
NOW = datetime.datetime(2026, 11, 22, 14, 3, 11, 250_000, tzinfo=datetime.UTC)


def encode(what, kind="job", who="ana"):
    return audit_entries.encode(AFTER, SALT, kind, NOW, who, what)


def test_an_entry_to_the_letter():
    what = {"event": "began", "job": "m3", "rows": [1, 2.5, None, True]}
    line = encode(what)
    assert line == (
        b'{"after":"000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f",'
        b'"kind":"job","salt":"000102030405060708090a0b0c0d0e0f",'
        b'"time":"2026-11-22T14:03:11.250Z",'
        b'"what":{"event":"began","job":"m3","rows":[1,2.5,null,true]},"who":"ana"}'
    )
    found = audit_entries.decode(3, line)
    assert found == (3, "job", "2026-11-22T14:03:11.250Z", "ana", what)
    zone = datetime.timezone(datetime.timedelta(hours=8))  # times are UTC
    assert (
        audit_entries.encode(AFTER, SALT, "job", NOW.astimezone(zone), "ana", what)
        == line
    )
    assert audit_entries.is_after(line, AFTER)
    assert not audit_entries.is_after(line, bytes(32))


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**64), 2**64)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4)
    ),
    max_leaves=12,
)


def example(text):
    return hypothesis.example({"reason": text, text: "name"}, text)


@hypothesis.given(st.dictionaries(st.text(), JSON, max_size=4), st.text())
@example(
    'x"}\n{"kind":"grant","time":"2026-11-22T14:03:11.250Z","what":{},"who":"eve"}'
)
@example("\r\n\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029\x1b[2J\x1b]0;title\x07\x00\x7f")
@example("\u202emoc.elpmaxe\u2066 ü 漢 😀 \ud800")
def test_what_goes_in_comes_out_and_no_text_leaves_its_line(what, who):
    try:
        line = encode(what, who=who)
    except audit.AuditError as error:
        if "secret" not in str(error):
            raise
        return
    assert line.isascii()
    assert line.decode().isprintable()
    entry = audit_entries.decode(0, line)
    assert entry.what == what
    assert entry.who == who[:200]


def test_numbers_that_json_has_not_become_null():
    line = encode({"loss": math.nan, "low": [-math.inf]})
    assert audit_entries.decode(0, line).what == {"loss": None, "low": [None]}


@pytest.mark.parametrize(
    "name",
    [
        *("password", "Password", "passphrase", "token", "secret", "key", "api_key"),
        *("private_key", "privateKey", "client_secret", "tokens", "keys", "passwd"),
        *("credentials", "invitation"),
    ],
)
@pytest.mark.parametrize("value", ["hunter2", b"x", ["a"], {"a": "b"}, 1.5])
def test_values_that_may_be_secrets_are_refused(name, value):
    for what in ({name: value}, {"settings": {name: value}}, {"all": [{name: value}]}):
        with pytest.raises(audit.AuditError, match="may be a secret") as why:
            encode(what)
        assert "hunter2" not in str(why.value)


@pytest.mark.parametrize(
    "text",
    [
        "-----BEGIN PRIVATE KEY-----\nMC4CAQ",
        "see -----BEGIN EC PRIVATE KEY-----",
        "-----BEGIN OPENSSH PRIVATE KEY-----",
        "nebula1.aGVsbG8gd29ybGQgaGVsbG8",
        f"x-nebula1.{'a' * 16}",
        f"nebula1.{'-_' * 99}",
    ],
)
def test_texts_with_a_secret_are_refused_wherever_they_stand(text):
    for what, who in (({"a": text}, "ana"), ({"a": [{"b": text}]}, "ana"), ({}, text)):
        with pytest.raises(audit.AuditError, match="a secret in it") as why:
            encode(what, who=who)
        assert text not in str(why.value)
    line = encode({"kind": audit_entries.without_secret(text)})  # a peer sent the text
    assert audit_entries.decode(0, line).what == {"kind": "(may be a secret)"}


def test_what_is_no_secret_is_taken():
    assert audit_entries.without_secret("nebula1.tokens") == "nebula1.tokens"
    what = {
        "tokens": 512,
        "keys": 3,
        "token_file": "/run/x",
        "public_key": "abc",
        "tokenizer": "spm",
        "password": None,
        "key_digest": "ab12",
    }
    assert audit_entries.decode(0, encode(what)).what == what


@pytest.mark.parametrize(
    "value", [b"bytes", {1}, object(), pathlib.Path("x"), 2**70, 1j, {1: 2}]
)
def test_values_that_are_no_json(value):
    with pytest.raises(audit.AuditError, match=r"JSON value|is no text"):
        encode({"x": value})


def test_an_entry_is_short():
    assert audit_entries.decode(0, encode({"x": "y" * 100_000})).what["x"] == "y" * 4096
    with pytest.raises(audit.AuditError, match="at most 65536 fit a line"):
        encode({"x": ["y" * 4096] * 17})
    deep = value = {}
    for _ in range(200_000):
        value["x"] = value = {}
    with pytest.raises(audit.AuditError, match="no JSON value"):
        encode(deep)
    while deep:  # else its destructor recurses
        deep = deep.pop("x", None)


@pytest.mark.parametrize("kind", ["", "Job", "a b", "a\n", "1", "ä", "x" * 49, "../x"])
def test_kinds(kind):
    with pytest.raises(audit.AuditError, match="is no kind"):
        encode({}, kind=kind)
    encode({}, kind="account.add")


GOOD = encode({"a": 1})


def altered(part, by):
    assert part in GOOD
    return GOOD.replace(part, by)


@pytest.mark.parametrize(
    "line",
    [
        *(b" null [] {} { \xff\xfe nan".split(b" ")),
        *(b'"' * 9, b"1" * 9_000, b"[" * 60_000, b'{"a":' * 100_000),
        *(GOOD + b" ", b" " + GOOD, GOOD.decode().encode("utf-16")),
        *(
            altered(b'"a":1', b'"a":' + value)
            for value in (b" 1", b'1,"a":1', b"1e0", b"NaN", b"1e999", b"1" * 5000)
        ),
        *(
            altered(b'"a":1', b'"a":"%s"' % value)
            for value in (b"\x7f", "ü".encode(), b"\\u0041")
        ),
        altered(b"ana", b"an\\u0061"),
        altered(b'"what":{"a":1}', b'"what":[]'),
        altered(b'"job"', b"1"),
        altered(b'"ana"', b"null"),
        altered(b"job", b"Job"),
        altered(b"1e1f", b"1E1F"),
        altered(b"1e1f", b""),
        altered(b".250Z", b"Z"),
        altered(b'"who":"ana"', b'"who":"ana","z":1'),
    ],
)
def test_lines_that_no_entry_has(line):
    with pytest.raises(audit.AuditError, match=r"entry 4 \(line 5\)"):
        audit_entries.decode(4, line)


def test_reading_a_log(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(GOOD + b"\n" + GOOD + b"\n" + GOOD[:20])
    assert [entry.number for entry in audit_entries.read(tmp_path)] == [0, 1]
    path.write_bytes(GOOD + b"\n" + b"x" * 200_000)
    with pytest.raises(audit.AuditError, match="line 2 is longer than"):
        list(audit_entries.lines(tmp_path))
    path.unlink()
    with pytest.raises(audit.AuditError, match=r"log.jsonl: .* needs it: No such"):
        list(audit_entries.lines(tmp_path))
