"""Codecs in a flag: `pack_tokens|svd(0.6)|fp16`, `int8(64, stochastic)|zstd(3)`.

The grammar is that of Python expressions: names and calls, chained by `|`. Arguments
are numbers, words or codecs: `error_feedback(top_k(0.01)|fp16)`. `true` and `false` are
booleans, other words are strings: `int8(row)`. Nothing is evaluated: the syntax tree is
read, and any other expression is an error.

`zstd(level)` is no codec: it compresses bytes, in the channel, after all codecs.
"""

import ast
import difflib
import inspect
import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, TypeGuard

from nebula_jax import errors
from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication import selector
from nebula_jax.communication.codecs import (
    block_floats,
    block_sparse,
    differences,
    floats,
    integers,
    low_rank,
    packing,
    rotations,
    sparse,
    wrappers,
)
from nebula_jax.communication.wire import zstd as zstd_lib

NAMES: dict[str, Callable[..., Any]] = {
    "bf16": floats.bf16,
    "delta": differences.delta,
    "e3m0": block_floats.e3m0,
    "error_feedback": wrappers.error_feedback,
    "fp16": floats.fp16,
    "fp8": floats.fp8,
    "from_step": wrappers.from_step,
    "hadamard": rotations.hadamard,
    "identity": codec_lib.identity,
    "int4": integers.int4,
    "int8": integers.int8,
    "pack_ids": packing.pack_ids,
    "pack_tokens": packing.pack_tokens,
    "sparse_loco": block_sparse.sparse_loco,
    "subspace": low_rank.subspace,
    "svd": low_rank.svd,
    "top_k": sparse.top_k,
}

MAX_LENGTH = 500  # characters: the parser's recursion and an error's text stay short
MAX_DEPTH = 8  # wrappers in wrappers: each doubles the inner codec's states
MAX_DIGITS = 20  # enough for float64 and int64
UNEXPECTED = re.compile(r"[^A-Za-z0-9_.,|()=+\-\s]")
TOKEN = re.compile(r"\w+|\S|$")


class CodecError(errors.NebulaError):
    """A codec's string that cannot be read; the error's text shows the place."""


class Compression(NamedTuple):
    """The ways in which a channel makes its tensors smaller.

    codec: of arrays, on the device.
    zstd: level at which the channel compresses the payload's bytes, 1 to 19, or None.
    """

    codec: selector.CodecOrSelector = codec_lib.identity()
    zstd: int | None = None


def from_string(text: str) -> Compression:
    """Reads a codec string.

    >>> from_string("pack_ids(250_002)|zstd(3)").zstd
    3
    >>> from_string("svd(0.6)|fp15")
    Traceback (most recent call last):
    ...
    nebula_jax.communication.codecs.parser.CodecError: unknown codec fp15; did you mean fp16?
      svd(0.6)|fp15
               ^

    Args:
      text: see this module's head; empty is `identity`.

    Raises:
      CodecError: with the text, a caret under the error, and the expectation.
    """  # noqa: E501
    reader = _Reader(text)
    return reader.chain(reader.parse(), depth=1) if text.strip() else Compression()


def zstd(level: int = 1) -> Compression:
    """Compresses nothing but the payload's bytes; see `wire.zstd`."""
    return Compression(zstd=zstd_lib.check_level(level))


CALLABLE: dict[str, Callable[..., Any]] = NAMES | {"zstd": zstd}


class _Reader:
    """A text, and the meaning of its syntax tree; positions are for error messages."""

    def __init__(self, text: str) -> None:
        self._text = text
        # In one line of ASCII the syntax tree's offsets count characters.
        self._line = re.sub(r"\s", " ", text.strip())
        self._indent = len(text) - len(text.lstrip())

    def parse(self) -> ast.expr:
        if len(self._text) > MAX_LENGTH:
            raise self._error(f"more than {MAX_LENGTH} characters", MAX_LENGTH)
        if wrong := UNEXPECTED.search(self._text):
            raise self._error(f"unexpected {wrong[0]!r}", wrong.start())
        try:
            with warnings.catch_warnings(action="error"):  # "1if" makes one
                return ast.parse(self._line, mode="eval").body
        except SyntaxError as error:
            at = self._indent + error.offset - 1 if error.offset else len(self._text)
            problem = error.msg
            if problem == "invalid syntax":
                found = TOKEN.match(self._text[at:].lstrip())
                assert found is not None  # it matches the end, too
                problem = f"unexpected {found[0] or 'end'}"
            raise self._error(problem, at) from None
        except (ValueError, RecursionError, MemoryError) as error:
            raise self._error(f"cannot be read: {error}", 0) from None

    def chain(self, node: ast.expr, depth: int) -> Compression:
        if depth > MAX_DEPTH:
            raise self._error(f"more than {MAX_DEPTH} codecs in codecs", node)
        nodes: list[ast.expr] = []
        while _is_chain(node):
            nodes.insert(0, node.right)
            node = node.left
        codecs: list[selector.CodecOrSelector] = []
        chained: selector.CodecOrSelector = codec_lib.identity()
        level: int | None = None
        for each in (node, *nodes):
            if level is not None:
                problem = "zstd works on bytes: it must be the last of its chain"
                raise self._error(problem, each)
            read = self.chain if _is_chain(each) else self._call
            codec, level = read(each, depth + 1)
            if codec != codec_lib.identity():
                codecs.append(codec)
            try:
                chained = selector.chain(*codecs)
            except ValueError as error:
                raise self._error(str(error), each) from None
        return Compression(chained, level)

    def _call(self, node: ast.expr, depth: int) -> Compression:
        # keyword, value, place for an error
        arguments: list[tuple[str | None, ast.expr, ast.expr | ast.keyword]]
        match node:
            case ast.Name(name):
                arguments = []
            case ast.Call(ast.Name(name), positional, keywords):
                arguments = [(None, value, value) for value in positional]
                arguments += [(each.arg, each.value, each) for each in keywords]
            case _:
                raise self._error(f"expected a codec, not {self._source(node)}", node)
        if name not in CALLABLE:
            close = difflib.get_close_matches(name, CALLABLE, n=1)
            known = "known: " + ", ".join(CALLABLE)
            hint = f"did you mean {close[0]}?" if close else known
            raise self._error(f"unknown codec {name}; {hint}", node)
        parameters = inspect.signature(CALLABLE[name]).parameters
        usage = f"{name}({', '.join(map(_shown, parameters.values()))})"
        given, places, level = {}, {}, None
        for number, (keyword, value, place) in enumerate(arguments):
            if keyword is None and number >= len(parameters):
                raise self._error(f"too many arguments: {usage}", place)
            keyword = keyword or list(parameters)[number]
            if keyword not in parameters:
                raise self._error(f"no argument {keyword}: {usage}", place)
            if keyword in given:
                raise self._error(f"{keyword} is given twice: {usage}", place)
            found = self._value(value, depth)
            if isinstance(found, Compression):
                found, level = found
            given[keyword], places[keyword] = found, place
        for keyword, parameter in parameters.items():
            if keyword not in given and parameter.default is parameter.empty:
                raise self._error(f"argument {keyword} is missing: {usage}", node)
        try:
            made = CALLABLE[name](**given)
        except ValueError as error:
            # A constructor's message begins with the argument's name.
            place = places.get(str(error).split()[0], node)
            raise self._error(f"{name}: {error}", place) from None
        return made if isinstance(made, Compression) else Compression(made, level)

    def _value(self, node: ast.expr, depth: int) -> Any:
        match node:
            case ast.UnaryOp(ast.USub() | ast.UAdd(), ast.Constant(number)):
                sign = -1 if isinstance(node.op, ast.USub) else 1
            case ast.Constant(number):
                sign = 1
            case ast.Name(word) if word not in CALLABLE:
                return {"true": True, "false": False}.get(word, word)
            case _:
                return self.chain(node, depth)
        if type(number) is not int and type(number) is not float:
            problem = f"expected a number, a word or a codec, not {self._source(node)}"
            raise self._error(problem, node)
        if sum(letter.isdigit() for letter in self._source(node)) > MAX_DIGITS:
            raise self._error(f"more than {MAX_DIGITS} digits", node)
        return sign * number

    def _source(self, node: ast.expr) -> str:
        return self._line[node.col_offset : node.end_col_offset]

    def _error(self, problem: str, place: int | ast.expr | ast.keyword) -> CodecError:
        if not isinstance(place, int):
            place = self._indent + place.col_offset
        shown = "".join(
            letter if letter.isprintable() else "?"
            for letter in self._text[:MAX_LENGTH]
        )
        return CodecError(f"{problem}\n  {shown}\n  {' ' * place}^")


def _is_chain(node: ast.expr) -> TypeGuard[ast.BinOp]:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr)


def _shown(parameter: inspect.Parameter) -> str:
    """Returns `flatten=false`, as a person would write it."""
    if parameter.default is parameter.empty:
        return parameter.name
    default = parameter.default
    shown = str(default).lower() if isinstance(default, bool) else str(default)
    return f"{parameter.name}={shown}"
