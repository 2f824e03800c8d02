"""Codecs in a flag: `pack_tokens|svd(0.6)|fp16`.

    chain  = call { "|" call }
    call   = name [ "(" [ argument { "," argument } ] ")" ]
    argument = [ word "=" ] ( number | word | chain )

A name that stands for a codec is one also as an argument: `error_feedback(fp16)`.
`true` and `false` are booleans; other words are strings: `int8(row)`.
"""

import difflib
import inspect
import re
from typing import Any, NamedTuple

from nebula_jax import errors
from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication.codecs import (
    differences,
    float8,
    floats,
    integers,
    low_rank,
    packing,
    rotations,
    sparse,
    wrappers,
)

NAMES = {
    "bf16": floats.bf16,
    "delta": differences.delta,
    "error_feedback": wrappers.error_feedback,
    "fp16": floats.fp16,
    "fp8": float8.fp8,
    "from_step": wrappers.from_step,
    "hadamard": rotations.hadamard,
    "identity": codec_lib.identity,
    "int4": integers.int4,
    "int8": integers.int8,
    "pack_ids": packing.pack_ids,
    "pack_tokens": packing.pack_tokens,
    "subspace": low_rank.subspace,
    "svd": low_rank.svd,
    "top_k": sparse.top_k,
    "zstd": packing.zstd,
}

TOKEN = re.compile(
    r"\s*(?:(?P<word>[A-Za-z_][A-Za-z_0-9]*)"
    r"|(?P<number>[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)"
    r"|(?P<sign>[|(),=])|(?P<end>$)|(?P<other>.))",
    re.DOTALL,
)
MAX_DEPTH = 8  # wrappers in wrappers; Python's own limit would be met otherwise
MAX_DIGITS = 20  # enough for float64 and int64


class CodecError(errors.NebulaError):
    """A codec's string that means nothing; its text shows where."""


class Token(NamedTuple):
    """kind: word, number, sign, end or other. start: where in the text."""

    kind: str
    text: str
    start: int


def from_string(text: str) -> codec_lib.Codec:
    """The codec that a string names.

    >>> from_string("svd(0.6)|fp16").options
    ()
    >>> from_string("svd(0.6)|fp15")
    Traceback (most recent call last):
    ...
    nebula_jax.communication.codecs.strings.CodecError: unknown codec fp15; did you mean fp16?
      svd(0.6)|fp15
               ^

    Args:
      text: see this module's head; empty is `identity`.

    Raises:
      CodecError: with the text, a caret under what is wrong, and what was expected.
    """  # noqa: E501
    return _Parser(text).whole()


class _Parser:
    """Recursive descent, one method a line of the grammar."""

    def __init__(self, text: str):
        self._text = text
        self._tokens = [
            Token(match.lastgroup, match[match.lastgroup], match.start(match.lastgroup))
            for match in TOKEN.finditer(text)
        ]
        self._tokens.append(Token("end", "", len(text.rstrip())))
        self._at = 0
        self._depth = 0

    def whole(self) -> codec_lib.Codec:
        if self._next().kind == "end":
            return codec_lib.identity()
        found = self._chain()
        if self._next().kind != "end":
            raise self._expected("| or the end")
        return found

    def _chain(self) -> codec_lib.Codec:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._error(f"more than {MAX_DEPTH} codecs in codecs")
        found = self._call()
        while self._accept("|"):
            start = self._next()
            following = self._call()
            try:
                found = codec_lib.chain(found, following)
            except ValueError as error:
                raise self._error(str(error), start) from None
        self._depth -= 1
        return found

    def _call(self) -> codec_lib.Codec:
        name = self._next()
        if name.kind != "word":
            raise self._expected("a codec's name")
        if name.text not in NAMES:
            close = difflib.get_close_matches(name.text, NAMES, n=1)
            hint = (
                f"did you mean {close[0]}?" if close else "known: " + ", ".join(NAMES)
            )
            raise self._error(f"unknown codec {name.text}; {hint}")
        self._at += 1
        arguments = []
        if self._accept("(") and not self._accept(")"):
            arguments.append(self._argument())
            while self._accept(","):
                arguments.append(self._argument())
            if not self._accept(")"):
                raise self._expected(", or )")
        return self._build(name, arguments)

    def _argument(self) -> tuple[str, Any, Token]:
        """Its name or "", its value, and where it begins."""
        start, name = self._next(), ""
        if start.kind == "word" and self._tokens[self._at + 1].text == "=":
            self._at += 2
            name = start.text
        return name, self._value(), start

    def _value(self) -> Any:
        token = self._next()
        if token.kind == "number":
            self._at += 1
            if sum(letter.isdigit() for letter in token.text) > MAX_DIGITS:
                raise self._error(f"more than {MAX_DIGITS} digits", token)
            is_whole = token.text.lstrip("+-").isdigit()
            return int(token.text) if is_whole else float(token.text)
        if token.kind != "word":
            raise self._expected("a number, a word or a codec")
        following = self._tokens[self._at + 1].text
        if token.text in NAMES or following in ("(", "|"):
            return self._chain()
        self._at += 1
        return {"true": True, "false": False}.get(token.text, token.text)

    def _build(self, name: Token, arguments: list) -> codec_lib.Codec:
        make = NAMES[name.text]
        signature = inspect.signature(make)
        usage = f"{name.text}({', '.join(map(_shown, signature.parameters.values()))})"
        known = list(signature.parameters)
        given: dict[str, Any] = {}
        for number, (keyword, value, start) in enumerate(arguments):
            if keyword and keyword not in known:
                raise self._error(f"no argument {keyword}: {usage}", start)
            if not keyword and any(each[0] for each in arguments[:number]):
                raise self._error(
                    f"arguments without a name come first: {usage}", start
                )
            if not keyword and number >= len(known):
                raise self._error(f"too many arguments: {usage}", start)
            keyword = keyword or known[number]
            if keyword in given:
                raise self._error(f"{keyword} is given twice: {usage}", start)
            given[keyword] = value
        try:
            signature.bind(**given)
        except TypeError as error:
            raise self._error(f"{error}: {usage}", name) from None
        try:
            return make(**given)
        except ValueError as error:
            # A constructor's words begin with the argument's name.
            places = dict(zip(given, (start for *_, start in arguments), strict=True))
            start = places.get(str(error).split()[0], name)
            raise self._error(f"{name.text}: {error}", start) from None

    def _next(self) -> Token:
        return self._tokens[self._at]

    def _accept(self, sign: str) -> bool:
        found = self._next().text == sign
        self._at += found
        return found

    def _expected(self, what: str) -> CodecError:
        token = self._next()
        got = repr(token.text) if token.text else "the end"
        return self._error(f"expected {what}, not {got}")

    def _error(self, problem: str, token: Token | None = None) -> CodecError:
        start = (token or self._next()).start
        shown = "".join(
            letter if letter.isprintable() else "?" for letter in self._text
        )
        return CodecError(f"{problem}\n  {shown}\n  {' ' * start}^")


def _shown(parameter: inspect.Parameter) -> str:
    """`flatten=false`, as a person would write it."""
    if parameter.default is parameter.empty:
        return parameter.name
    default = parameter.default
    shown = str(default).lower() if isinstance(default, bool) else str(default)
    return f"{parameter.name}={shown}"
