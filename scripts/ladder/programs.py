"""The all-reduces of a compiled program, counted in its text.

A loop's body counts as often as the loop runs, which XLA writes beside it.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

BYTES = {"pred": 1, "bf16": 2, "f16": 2, "f32": 4, "f64": 8, "s32": 4, "u32": 4}
"""Type of an array in a program -> bytes of a value."""

_HEAD = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"(?:ROOT )?%?[\w.-]+ = (.*?) ([a-z][\w-]*)\((.*)$")
_SHAPE = re.compile(rf"({'|'.join(BYTES)})\[([\d,]*)\]")
_CALLED = re.compile(r"(?:body|to_apply|calls|true_computation)=%?([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{%?([\w.-]+)")
_TIMES = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_SUM = ("all-reduce", "all-reduce-start")
_RUNS = ("while", "call", "conditional", "async-start")


class AllReduces(NamedTuple):
    """The all-reduces of one execution of a program."""

    times: int
    """All-reduces with more than one value: gradients."""
    scalars: int
    """All-reduces of a single value: metrics."""
    bytes: int
    """Bytes that are added up, of all of them. A member of a ring of N sends
    2 (N - 1) / N as many."""


class _Instruction(NamedTuple):
    """An instruction that matters here: a sum, or one that runs other instructions."""

    kind: str
    shape: str
    rest: str


def all_reduces(text: str) -> AllReduces:
    """Counts the all-reduces of a program.

    Args:
      text: of the program, after XLA's optimizations (`compiled.as_text()`).

    Raises:
      ValueError: if an all-reduce is in a loop that runs an unknown number of times, or
        there is no entry.
    """
    entry, computations = _parsed(text)
    sums = [(times, *_size(shape)) for times, shape in _sums(computations, entry, 1)]
    return AllReduces(
        sum(times for times, values, _ in sums if values > 1),
        sum(times for times, values, _ in sums if values == 1),
        sum(times * size for times, _, size in sums),
    )


def _size(shape: str) -> tuple[int, int]:
    """Returns the values and the bytes of an array or a tuple: `f32[2,3]` -> 6, 24."""
    parts = [
        (BYTES[kind], math.prod(int(each) for each in sizes.split(",") if each))
        for kind, sizes in _SHAPE.findall(shape)
    ]
    return sum(count for _, count in parts), sum(size * n for size, n in parts)


def _parsed(text: str) -> tuple[str, dict[str, list[_Instruction]]]:
    """Returns the entry's name, and each computation's instructions that matter."""
    computations: dict[str, list[_Instruction]] = {}
    entry = inside = ""
    for line in text.splitlines():
        head = _HEAD.match(line)
        if head:
            inside = head[2]
            computations[inside] = []
            entry = inside if head[1] else entry
            continue
        found = _INSTRUCTION.match(line.strip())
        if found and inside:
            shape, kind, rest = found.groups()
            if kind in _SUM or kind in _RUNS:
                computations[inside].append(_Instruction(kind, shape, rest))
    if not entry:
        raise ValueError("this is no compiled program: it has no ENTRY")
    return entry, computations


def _sums(
    computations: dict[str, list[_Instruction]], name: str, times: int
) -> Iterator[tuple[int, str]]:
    """Yields how often each all-reduce runs, and the shape of what it adds up."""
    for each in computations.get(name, ()):
        if each.kind in _SUM:
            yield times, each.shape
            continue
        within = 1
        called = [*_CALLED.findall(each.rest), *_BRANCHES.findall(each.rest)]
        if each.kind == "while":
            known = _TIMES.search(each.rest)
            within = int(known[1]) if known else 0
        for other in called:
            inner = list(_sums(computations, other, times * (within or 1)))
            if inner and not within:
                raise ValueError(f"a loop of {name} runs an unknown number of times")
            yield from inner
