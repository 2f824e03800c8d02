"""Codecs in a flag: `pack_tokens|svd(0.6)|fp16`, `error_feedback(int4(64))|zstd(3)`.

The grammar is that of Python expressions: names and calls, chained by `|`. Arguments
are numbers, codecs, `true`, `false` or other words, which are strings: `int8(row)`.
Nothing is evaluated: the syntax tree is read.

`my_codecs:signs(4)` is a codec of one's own: `signs(4)` of the module `my_codecs`,
which is imported (`own`). So a codec string is code: it is only ever read from this
process's own flags or program. What a peer or a checkpoint says of its codec is
compared as text.
"""

import ast
import difflib
import inspect
import re
import types
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from nebula_jax import errors, printable
from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication import selector
from nebula_jax.communication.codecs import (
    block_floats,
    block_sparse,
    floats,
    integers,
    low_rank,
    own,
    packing,
    privacy,
    rotations,
    wrappers,
)

_MADE_BY: dict[str, Callable[..., selector.CodecOrSelector]] = {
    "bf16": floats.bf16,
    "e3m0": block_floats.e3m0,
    "error_feedback": wrappers.error_feedback,
    "fp16": floats.fp16,
    "from_step": wrappers.from_step,
    "hadamard": rotations.hadamard,
    "identity": codec_lib.identity,
    "int4": integers.int4,
    "int8": integers.int8,
    "pack_ids": packing.pack_ids,
    "pack_tokens": packing.pack_tokens,
    "private": privacy.private,
    "sparse_loco": block_sparse.sparse_loco,
    "svd": low_rank.svd,
    "zstd": codec_lib.zstd,
}
NAMES: Mapping[str, Callable[..., selector.CodecOrSelector]] = types.MappingProxyType(
    _MADE_BY
)
"""Name in a string -> the function that makes the codec. It cannot be added to: a codec
of one's own is `module:name`."""

MAX_LENGTH = 500  # characters: the parser's recursion and an error's text stay short
MAX_DEPTH = 8  # wrappers in wrappers: each doubles the inner codec's states
MAX_DIGITS = 20  # enough for float64 and int64
UNEXPECTED = re.compile(r"[^A-Za-z0-9_.,|()=+\-\s]")
OWN = re.compile(r"\b[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", re.ASCII)
TOKEN = re.compile(r"\w+|\S|$")


class CodecError(errors.SettingsError):
    """A codec's string that cannot be read; the error's text shows the place."""


def given(name: str, codec: Any) -> selector.CodecOrSelector:
    """Returns the codec of an argument `name`: one, or its name as in a flag.

    Raises errors.SettingsError if it is neither; or a CodecError, as `from_string`.
    """
    if isinstance(codec, str):
        return from_string(codec)
    if not isinstance(codec, codec_lib.Codec | selector.Selector):
        raise errors.SettingsError(
            f"{name}={codec!r}: expected a codec, such as nebula.codecs.int8(64), or"
            ' its name, "int8(64)"'
        )
    return codec


def from_string(text: str) -> selector.CodecOrSelector:
    """Reads a codec string: the same codec as by calls, with a name.

    >>> from_string("svd(0.6)|fp16|zstd(3)").name
    'svd(0.6, false)|fp16'
    >>> from_string("svd(0.6)|fp15")
    Traceback (most recent call last):
    ...
    nebula_jax.communication.codecs.parser.CodecError: unknown codec fp15; did you mean fp16?
      svd(0.6)|fp15
               ^

    Args:
      text: see this module's head; empty is `identity`. It may name a module, which is
        imported: never a text of somebody else's.

    Returns:
      A Codec, or a Selector if a part of it is one.

    Raises:
      CodecError: with the text, a caret under the error, and the expectation.
    """  # noqa: E501
    reader = _Reader(text)
    if not text.strip():
        return codec_lib.identity()
    return reader.chain(reader.parse(), depth=1)


class _Reader:
    """A text, and the meaning of its syntax tree; positions are for error messages."""

    def __init__(self, text: str) -> None:
        self._text = text
        # In one line of ASCII the syntax tree's offsets count characters.
        self._line = re.sub(r"\s", " ", text.strip())
        self._indent = len(text) - len(text.lstrip())
        self._own: set[int] = set()  # where `module:name` stands in the line

    def parse(self) -> ast.expr:
        if len(self._text) > MAX_LENGTH:
            raise self._error(f"more than {MAX_LENGTH} characters", MAX_LENGTH)
        # `module:name` is no Python: a name as long takes its place.
        self._own = {each.start() for each in OWN.finditer(self._line)}
        line = OWN.sub(lambda each: "_" * len(each[0]), self._line)
        if wrong := UNEXPECTED.search(line):
            problem = f"unexpected {wrong[0]!r}"
            if wrong[0] in ":/":
                problem += "; a codec of one's own is module:name"
            raise self._error(problem, self._indent + wrong.start())
        try:
            with warnings.catch_warnings(action="error"):  # "1if" makes one
                return ast.parse(line, mode="eval").body
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

    def chain(self, node: ast.expr, depth: int) -> selector.CodecOrSelector:
        if depth > MAX_DEPTH:
            raise self._error(f"more than {MAX_DEPTH} codecs in codecs", node)
        nodes: list[ast.expr] = []
        while _is_chain(node):
            nodes.insert(0, node.right)
            node = node.left
        chained: selector.CodecOrSelector = codec_lib.identity()
        codecs: list[selector.CodecOrSelector] = []
        for each in (node, *nodes):
            read = self.chain if _is_chain(each) else self._call
            codecs.append(read(each, depth + 1))
            try:
                chained = selector.chain(*codecs)
            except ValueError as error:
                raise self._error(str(error), each) from None
        return chained

    def _call(self, node: ast.expr, depth: int) -> selector.CodecOrSelector:
        # keyword, value, place for an error
        arguments: list[tuple[str | None, ast.expr, ast.expr | ast.keyword]]
        match node:
            case ast.Name():
                called, arguments = node, []
            case ast.Call(ast.Name() as called, positional, keywords):
                arguments = [(None, value, value) for value in positional]
                arguments += [(each.arg, each.value, each) for each in keywords]
            case _:
                raise self._error(f"expected a codec, not {self._source(node)}", node)
        name = self._source(called)
        make, parameters = self._function(called, name)
        if isinstance(make, codec_lib.Codec | selector.Selector):
            if called is not node:
                raise self._error(f"{name} is a codec, so it has no arguments", node)
            return make._replace(name=name)
        usage = f"{name}({', '.join(map(_shown, parameters.values()))})"
        given: dict[str, Any] = {}
        places: dict[str, ast.expr | ast.keyword] = {}
        for number, (keyword, value, place) in enumerate(arguments):
            if keyword is None and number >= len(parameters):
                raise self._error(f"too many arguments: {usage}", place)
            keyword = keyword or list(parameters)[number]
            if keyword not in parameters:
                raise self._error(f"no argument {keyword}: {usage}", place)
            if keyword in given:
                raise self._error(f"{keyword} is given twice: {usage}", place)
            given[keyword], places[keyword] = self._value(value, depth), place
        for keyword, parameter in parameters.items():
            if keyword not in given and parameter.default is parameter.empty:
                raise self._error(f"argument {keyword} is missing: {usage}", node)
        try:
            if self._is_own(called):
                return own.made(name, make, given)
            return make(**given)
        except ValueError as error:
            # A constructor's message begins with the argument's name.
            place = places.get(str(error).partition(" ")[0], node)
            problem = f"{name}: {printable.line(error, printable.LINE_LIMIT)}"
            raise self._error(problem, place) from error.__cause__

    def _is_own(self, node: ast.Name) -> bool:
        return node.col_offset in self._own

    def _function(
        self, node: ast.Name, name: str
    ) -> tuple[Any, Mapping[str, inspect.Parameter]]:
        """Returns what makes the codec of that name, or is it; and its parameters."""
        if self._is_own(node):
            try:
                make = own.found(name)
                return make, own.parameters(make) if callable(make) else {}
            except ValueError as error:
                raise self._error(str(error), node) from error.__cause__
        if name not in NAMES:
            close = difflib.get_close_matches(name, NAMES, n=1)
            known = "known: " + ", ".join(NAMES)
            hint = f"did you mean {close[0]}?" if close else known
            raise self._error(f"unknown codec {name}; {hint}", node)
        return NAMES[name], inspect.signature(NAMES[name]).parameters

    def _value(self, node: ast.expr, depth: int) -> Any:
        match node:
            case ast.UnaryOp(ast.USub() | ast.UAdd(), ast.Constant(number)):
                sign = -1 if isinstance(node.op, ast.USub) else 1
            case ast.Constant(number):
                sign = 1
            case ast.Name(word) if word not in NAMES and not self._is_own(node):
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
