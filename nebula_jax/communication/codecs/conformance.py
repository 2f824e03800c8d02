"""What every codec promises, tried on one: `codecs.check(my_codecs.signs(4), spec)`.

The receiver's end is given what a link would give it: the spec, the number of a
Selector's option, and bytes.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from nebula_jax import errors, printable
from nebula_jax.communication import arrivals, selector
from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication.codecs import leaves

STEPS = 3  # tensors of a stream
ROUNDING = 1e-5  # of the size of what crosses: float32 sums in another order
LOST = 0.1  # of what a codec loses: one value more or less that rounds the other way


@dataclasses.dataclass(frozen=True)
class Report:
    """The findings of `check`.

    codec: its name.
    broken: a sentence for each rule that it breaks.
    ratio: bytes of its largest payload over those of the arrays.
    error: ||decoded - sent|| / ||sent|| of floating-point leaves, the largest of a few
      normally distributed tensors that follow each other.
    """

    codec: str
    broken: tuple[str, ...]
    ratio: float = np.nan
    error: float = np.nan

    def __repr__(self) -> str:
        head = f"{self.codec}: {self.ratio:.3g} of the bytes, error {self.error:.2g}"
        if not self.broken:
            return f"{head}; keeps all rules"
        count = len(self.broken)
        rules = f"{count} rule{'s' * (count > 1)}"
        return "\n  ".join([f"{head}; breaks {rules}:", *self.broken])


def check(
    codec: selector.CodecOrSelector, spec: codec_lib.Spec, *, eager: bool = True
) -> Report:
    """Tries a codec on arrays of a spec, and says which rules it breaks.

    - What is decoded has the tree, shapes and dtypes of what was encoded; leaves that
      are no floats come back as they were.
    - A payload is arrays of the same shapes and dtypes whatever the values, and its
      bytes are all that decoding needs.
    - A state is arrays that keep their shapes and dtypes, can be saved, and are new at
      each `init`: a channel uses its state up.
    - The same arrays give the same bytes, and with and without jit the same values.
    - Zeros come back as zeros, and finite values finite, also after a bad tensor.
    - NaN and Inf never become finite: NaN comes back as NaN, and Inf as the same Inf or
      NaN. Of values beside it that share a scale NaN may come back, not Inf; a codec
      may also refuse the payload (`check_values` of its nodes).

    >>> from nebula_jax.communication import codecs
    >>> check(codecs.int8("row"), jax.ShapeDtypeStruct((8, 77), "float32"))
    int8(row): 0.263 of the bytes, error 0.0061; keeps all rules

    Args:
      codec: a Codec or a Selector.
      spec: tree of jax.ShapeDtypeStruct. Floats are drawn; integers [n] are 0 to n - 1,
        others 0 and 1; booleans are True. An array in the place of a spec is used as it
        is: give one where a codec needs certain integers.
      eager: False leaves out what is slow, the comparison with no jit.
    """
    try:
        selector.fitted("arrays", codec, spec)
        subject = _Subject(selector.as_selector(codec), spec)
        stream = subject.stream(_Line(subject))
    except errors.SettingsError as error:
        return Report(codec.name, (str(error),))
    except Exception as error:
        return Report(codec.name, (_raised("encoding or decoding fails", error),))
    ratio = max(map(codec_lib.nbytes, subject.payloads)) / codec_lib.nbytes(spec)
    lost = max(_lost(each.sent, each.got) for each in stream)
    rules = {name: rule for name, rule in _RULES.items() if eager or rule != _eagerly}
    broken: list[str] = []
    for name, rule in rules.items():
        try:
            broken += rule(subject, stream)
        except Exception as error:
            broken.append(_raised(name, error))
    return Report(codec.name, tuple(broken), ratio, lost)


class _Sent(NamedTuple):
    """A tensor that crossed: what was sent, its option and bytes, what was decoded."""

    sent: Any
    option: int
    buffers: list[bytes]
    got: Any


class _Subject:
    """A codec, compiled once for all rules, and the arrays that it is tried on."""

    def __init__(self, codec: selector.Selector, given: Any) -> None:
        self.eager, self.codec, self.given = codec, selector.compiled(codec), given
        self.payloads = [codec_lib.payload_spec(each, given) for each in codec.codecs]

    def arrays(self, step: int) -> Any:
        """Draws arrays that change a little from step to step."""
        found, structure = jax.tree.flatten(self.given)
        return jax.tree.unflatten(
            structure, [_drawn(leaf, step, i) for i, leaf in enumerate(found)]
        )

    def with_value(self, value: float) -> tuple[Any, int]:
        """Returns the first arrays with a value in the middle of their largest leaf."""
        found, structure = jax.tree.flatten(self.arrays(0))
        sizes = [leaf.size * leaves.is_float(leaf) for leaf in found]
        number = int(np.argmax(sizes))
        found[number] = found[number].copy()
        found[number].reshape(-1)[sizes[number] // 2] = value
        return jax.tree.unflatten(structure, found), number

    def stream(self, line: "_Line") -> list[_Sent]:
        return [line.send(self.arrays(step)) for step in range(STEPS)]


class _Line:
    def __init__(self, subject: _Subject, eager: bool = False) -> None:
        self._subject = subject
        self._codec = subject.eager if eager else subject.codec
        self.sender = self._codec.init(subject.given)
        self.receiver = self._codec.init(subject.given)
        self.step = 0

    def send(self, arrays: Any) -> _Sent:
        """Raises ValueError if the payload is refused on arrival."""
        self.step += 1
        sent, self.sender = self._codec.encode(arrays, self.sender, self.step)
        planned = self._subject.payloads[sent.option]
        if found := codec_lib.difference(planned, sent.payload):
            raise TypeError(
                f"the payload should have {found[0]} and has {found[1]}: its shapes"
                " must follow from those of the arrays alone"
            )
        buffers = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(sent.payload)]
        arrived = [
            np.frombuffer(buffer, leaf.dtype).reshape(leaf.shape)
            for buffer, leaf in zip(buffers, jax.tree.leaves(planned), strict=True)
        ]
        payload = jax.tree.unflatten(jax.tree.structure(planned), arrived)
        try:
            arrivals.check_payload(payload)
        except ValueError as error:
            raise _Refused(str(error)) from None
        came = selector.Selected(payload, sent.option)
        got, self.receiver = self._codec.decode(came, self.receiver)
        return _Sent(arrays, sent.option, buffers, jax.device_get(got))


class _Refused(Exception):
    """A payload that `check_values` of a node of it refuses."""


def _drawn(leaf: Any, step: int, number: int) -> np.ndarray:
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return np.array(leaf)
    if leaves.is_float(leaf):
        base = np.random.RandomState(number).standard_normal(leaf.shape)
        new = np.random.RandomState(1000 * (step + 1) + number)
        return np.array(base + 0.1 * new.standard_normal(leaf.shape), leaf.dtype)
    if leaf.dtype == np.bool_:
        return np.ones(leaf.shape, np.bool_)
    numbers = np.arange(codec_lib.nbytes(leaf) // leaf.dtype.itemsize)
    if len(leaf.shape) != 1:
        numbers = numbers % 2
    return numbers.reshape(leaf.shape).astype(leaf.dtype)


def _floats(arrays: Any) -> list[np.ndarray]:
    return [np.asarray(leaf, np.float64) for leaf in leaves.floats(arrays)]


def _lost(sent: Any, got: Any) -> float:
    """Returns ||got - sent|| / ||sent|| of all floating-point leaves together."""
    pairs = list(zip(_floats(sent), _floats(got), strict=True))
    size = sum(float(np.sum(one**2)) for one, _ in pairs)
    with np.errstate(invalid="ignore"):
        apart = sum(float(np.sum((two - one) ** 2)) for one, two in pairs)
    return (apart / size) ** 0.5 if size else 0.0


def _same(one: Any, two: Any) -> bool:
    return all(
        np.asarray(here).tobytes() == np.asarray(there).tobytes()
        for here, there in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True)
    )


def _raised(what: str, error: Exception) -> str:
    text = printable.line(str(error).split("\n", maxsplit=1)[0], 300)
    return f"{what}: {type(error).__name__}: {text}"


# The rules: each yields a sentence for what it finds broken.


def _others(subject: _Subject, stream: list[_Sent]) -> Iterator[str]:
    for sent, _, _, got in stream[:1]:
        paths = jax.tree_util.tree_leaves_with_path(sent)
        for (path, one), two in zip(paths, jax.tree.leaves(got), strict=True):
            if not leaves.is_float(one) and not np.array_equal(one, two):
                name = jax.tree_util.keystr(path)
                yield f"leaf {name} is no float, and did not come back as it was"


def _again(subject: _Subject, stream: list[_Sent]) -> Iterator[str]:
    again = subject.stream(_Line(subject))
    for one, two in zip(stream, again, strict=True):
        if (one.option, one.buffers) != (two.option, two.buffers):
            yield "the same arrays, sent anew, give other bytes"
            return
        if not _same(one.got, two.got):
            yield "the same bytes, received anew, give other values"
            return


def _eagerly(subject: _Subject, stream: list[_Sent]) -> Iterator[str]:
    line = _Line(subject, eager=True)
    for each in stream[:2]:
        apart = _lost(each.got, line.send(each.sent).got)
        lost = _lost(each.sent, each.got)
        if not apart <= ROUNDING + LOST * lost:
            yield (
                f"with and without jit its values differ by {apart:.2g} of their size,"
                f" where it loses {lost:.2g}"
            )
            return


def _saved(subject: _Subject, stream: list[_Sent]) -> Iterator[str]:
    line = _Line(subject)
    for each in stream[:-1]:
        line.send(each.sent)
    line.sender = jax.tree.map(np.asarray, line.sender)
    line.receiver = jax.tree.map(np.asarray, line.receiver)
    found = line.send(stream[-1].sent)
    if found.buffers != stream[-1].buffers or not _same(found.got, stream[-1].got):
        yield "with states that were saved and read again it sends something else"


def _zeros(subject: _Subject, stream: list[_Sent]) -> Iterator[str]:
    line = _Line(subject)
    for _ in range(2):
        zeros = leaves.encode(np.zeros_like, subject.arrays(0))
        if any(np.any(leaf) for leaf in _floats(line.send(zeros).got)):
            yield "zeros do not come back as zeros"
            return


def _not_finite(subject: _Subject, stream: list[_Sent]) -> Iterator[str]:
    values = (np.nan, np.inf, -np.inf) if leaves.floats(subject.given) else ()
    for value in values:
        arrays, number = subject.with_value(value)
        try:
            got = jax.tree.leaves(_Line(subject).send(arrays).got)
        except _Refused:
            continue
        sent = np.asarray(jax.tree.leaves(arrays)[number], np.float64).reshape(-1)
        there = np.asarray(got[number], np.float64).reshape(-1)
        place = ~np.isfinite(sent)
        if not (np.isnan(there[place][0]) or there[place][0] == value):
            yield (
                f"{value} comes back as {there[place][0]:.3g}: what is not finite must"
                " not become finite, but decode as NaN, as must all values with which"
                " it shares a scale"
            )
        if np.any(np.isinf(there[~place])):
            yield (
                f"beside {value}, finite values come back as Inf; they may be NaN: let"
                " a scale that is not finite become NaN"
            )


def _recovers(subject: _Subject, stream: list[_Sent]) -> Iterator[str]:
    if not leaves.floats(subject.given):
        return
    line = _Line(subject)
    line.send(subject.arrays(0))
    try:
        line.send(subject.with_value(np.nan)[0])
    except _Refused:
        return
    line.send(subject.arrays(1))
    last = line.send(subject.arrays(2)).got
    if not all(np.all(np.isfinite(leaf)) for leaf in _floats(last)):
        yield "after a tensor with NaN later ones are not finite either"


def _finite(subject: _Subject, stream: list[_Sent]) -> Iterator[str]:
    if not all(
        np.all(np.isfinite(leaf)) for each in stream for leaf in _floats(each.got)
    ):
        yield "finite values of ordinary size do not come back finite"


_RULES: dict[str, Callable[[_Subject, list[_Sent]], Iterator[str]]] = {
    "leaves that are no floats": _others,
    "finite values": _finite,
    "the same arrays again": _again,
    "without jit": _eagerly,
    "a saved state": _saved,
    "zeros": _zeros,
    "NaN and Inf": _not_finite,
    "after NaN": _recovers,
}
