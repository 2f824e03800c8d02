"""One line an entry, whatever somebody puts into it, and no secrets."""

import datetime
import json
import math
import pathlib

import hypothesis
import pytest
from hypothesis import strategies as st

from nebula_jax.security import audit
from nebula_jax.security.audit import entries as audit_entries

NOW = datetime.datetime(2026, 11, 22, 14, 3, 11, 250_000, tzinfo=datetime.UTC)


def encode(what, kind="job", who="ana"):
    return audit_entries.encode(kind, NOW, who, what)


def test_an_entry_to_the_letter():
    line = encode({"event": "began", "job": "m3", "rows": [1, 2.5, None, True]})
    assert line == (
        b'{"kind":"job","time":"2026-11-22T14:03:11.250Z",'
        b'"what":{"event":"began","job":"m3","rows":[1,2.5,null,true]},"who":"ana"}'
    )
    assert audit_entries.decode(3, line) == audit_entries.Entry(
        3,
        "job",
        "2026-11-22T14:03:11.250Z",
        "ana",
        {"event": "began", "job": "m3", "rows": [1, 2.5, None, True]},
    )


def test_times_are_utc():
    zone = datetime.timezone(datetime.timedelta(hours=8))
    line = audit_entries.encode("job", NOW.astimezone(zone), "ana", {})
    assert audit_entries.decode(0, line).time == "2026-11-22T14:03:11.250Z"


@pytest.mark.parametrize(
    "text",
    [
        'x"}\n{"kind":"grant","time":"2026-11-22T14:03:11.250Z","what":{},"who":"eve"}',
        "\r\n\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029",
        "\x1b[2J\x1b]0;title\x07",
        "\u202emoc.elpmaxe\u2066",
        "\x00\x7f",
        "\ud800",
        "ü 漢 😀",
    ],
)
def test_no_text_leaves_its_line(text):
    line = encode({"reason": text, text: "name"}, who=text)
    assert line.isascii()
    assert line.decode().isprintable()
    entry = audit_entries.decode(0, line)
    assert entry.what == {"reason": text, text: "name"}
    assert entry.who == text


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


@hypothesis.given(st.dictionaries(st.text(), JSON, max_size=4), st.text())
def test_what_goes_in_comes_out(what, who):
    try:
        line = encode(what, who=who)
    except audit_entries.SecretError:
        return
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
        with pytest.raises(audit_entries.SecretError, match="may be a secret") as why:
            encode(what)
        assert "hunter2" not in str(why.value)


@pytest.mark.parametrize(
    "text",
    [
        "-----BEGIN PRIVATE KEY-----\nMC4CAQ",
        "see -----BEGIN EC PRIVATE KEY-----",
        "-----BEGIN OPENSSH PRIVATE KEY-----",
        "nebula1.aGVsbG8gd29ybGQgaGVsbG8",
    ],
)
def test_texts_with_a_secret_are_refused_wherever_they_stand(text):
    for call in (
        lambda: encode({"note": text}),
        lambda: encode({"notes": [{"a": text}]}),
        lambda: encode({}, who=text),
    ):
        with pytest.raises(audit_entries.SecretError, match="a secret in it") as why:
            call()
        assert text not in str(why.value)


@pytest.mark.parametrize(
    "text",
    ["-----BEGIN PRIVATE KEY-----", f"x-nebula1.{'a' * 16}", f"nebula1.{'-_' * 99}"],
)
def test_a_text_of_a_peer_never_keeps_an_entry_out(text):
    with pytest.raises(audit_entries.SecretError):
        encode({"kind": text})
    line = encode({"kind": audit_entries.without_secret(text)})
    assert audit_entries.decode(0, line).what == {"kind": "(may be a secret)"}
    assert audit_entries.without_secret("nebula1.tokens") == "nebula1.tokens"


def test_what_is_no_secret_is_taken():
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


@pytest.mark.parametrize(
    "line",
    [
        *(
            b"",
            b"null",
            b"[]",
            b"{}",
            b"{",
            b"\xff\xfe",
            b"nan",
            b'"' * 9,
            b"1" * 9_000,
        ),
        GOOD + b" ",
        b" " + GOOD,
        GOOD.replace(b'"a":1', b'"a": 1'),
        GOOD.replace(b'"a":1', b'"a":1,"a":1'),
        GOOD.replace(b'"a":1', b'"a":1e0'),
        GOOD.replace(b'"a":1', b'"a":NaN'),
        GOOD.replace(b'"a":1', b'"a":1e999'),
        GOOD.replace(b'"a":1', b'"a":' + b"1" * 5000),
        GOOD.replace(b'"a":1', b'"a":"\x7f"'),
        GOOD.replace(b'"a":1', '"a":"ü"'.encode()),
        GOOD.replace(b'"a":1', b'"a":"\\u0041"'),
        GOOD.replace(b"ana", b"an\\u0061"),
        GOOD.replace(b'"what":{"a":1}', b'"what":[]'),
        GOOD.replace(b'"job"', b"1"),
        GOOD.replace(b'"ana"', b"null"),
        GOOD.replace(b"job", b"Job"),
        GOOD.replace(b".250Z", b"Z"),
        GOOD.replace(b'"who":"ana"', b'"who":"ana","z":1'),
        GOOD.decode().encode("utf-16"),
        b"[" * 60_000,
        b'{"a":' * 100_000,
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


def test_the_witness_of_an_entry():
    what = {"event": audit_entries.WITNESSED, "lab": "lab-t", "verifier": "v"}
    assert audit_entries.witness_of(encode(what, "audit")) == ("lab-t", "v")
    for line in (
        encode(what, "job"),
        encode({**what, "event": "x", "in": what}, "audit"),
        encode({**what, "lab": 3}, "audit"),
        encode({"text": json.dumps(what)}, "audit"),
        GOOD + b'"event":"is witnessed by"',
    ):
        assert audit_entries.witness_of(line) is None
