"""The promises of every codec, as a caller sees them: one list, one suite.

B batch, L length, D width. A case's batch travels as buffers: the receiver knows the
spec, the option's number and the bytes, and nothing else.
"""

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable
from typing import Any

import children
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication import codecs, selector
from nebula_jax.communication.codecs import conformance
from nebula_jax.parallel import mesh as mesh_lib

B, L, D = 8, 16, 24
N = B * L * D
IDS, MASK, INDEX = 4 * B * L, B * L, 4 * B  # bytes of the leaves beside h
BESIDE = IDS + MASK + INDEX
LENGTHS = (16, 3, 9, 12, 1, 7, 16, 5)  # 69 real tokens: 5/8 of the slots hold them
SLOTS = (16, 32, 48, 64, 80, 96, 112, 128)
STEPS = 3


@dataclasses.dataclass(frozen=True)
class Case:
    """One codec and what is promised of it."""

    string: str
    error: float
    """Largest relative error (Frobenius) of h over a stream of Gaussian tensors."""
    nbytes: Callable[[int], int]  # bytes of a payload of the batch, by option
    bad: int | str = 1
    """Reach of NaN and Inf: a group of so many neighbors; 1: carried as it is;
    "refused": the payload is refused on arrival."""
    eager: bool = False  # also without jit (slow: where no other case shows it)
    shards: float = 0.0
    """Largest difference that sharding over devices may make."""


ROWS = B * L
# Float32 sums in another order: of up to 384 terms, 1e-6 of the largest value or so.
SUMS = 2e-6
CASES = [
    Case("identity", 0.0, lambda i: 4 * N + BESIDE),
    Case("zstd(3)", 0.0, lambda i: 4 * N + BESIDE),
    Case("pack_ids(4000)", 0.0, lambda i: 4 * N + 12 * (ROWS + B) // 8 + ROWS // 8),
    Case("fp16", 2**-11, lambda i: 2 * N + BESIDE),
    Case("bf16", 2**-8, lambda i: 2 * N + BESIDE),
    Case("int8(tensor)", 0.01, lambda i: N + 4 + BESIDE, N),
    Case("int8(row)", 0.006, lambda i: N + 4 * ROWS + BESIDE, D),
    Case("int4(64)", 0.12, lambda i: N // 2 + 4 * (N // 64) + BESIDE, 64, True),
    Case("e3m0", 0.21, lambda i: N // 2 + 4 * (N // 256) + BESIDE, 256, True),
    Case("private(1e4)", 0.0, lambda i: 4 * N + BESIDE, N),
    Case("hadamard", 5e-7, lambda i: 4 * N + BESIDE, 8, True, SUMS),
    Case(
        "hadamard|int4(64)",
        0.12,
        lambda i: N // 2 + 4 * (N // 64) + BESIDE,
        64,
        False,
        0.15,  # a sum that rounds the other way moves a value by a step of 1/7
    ),
    Case("svd(0.6)", 0.5, lambda i: 4 * B * 9 * (L + D) + BESIDE, L * D, False, SUMS),
    Case("svd(0.6,true)", 0.5, lambda i: 4 * 14 * (ROWS + D) + BESIDE, N, True, SUMS),
    # 16 of each 256 values, at 8 bits.
    Case(
        "sparse_loco(16,256)",
        0.88,
        lambda i: 12 * (16 + 4) + 16 + BESIDE,
        "refused",
        True,
        SUMS,
    ),
    Case("pack_tokens", 0.0, lambda i: SLOTS[i] * (4 * D + 4) + MASK // 8 + INDEX),
    Case(
        "pack_tokens|svd(0.5)|fp16",
        0.6,
        lambda i: (
            2 * (min(SLOTS[i], D) // 2) * (SLOTS[i] + D)
            + 4 * SLOTS[i]
            + MASK // 8
            + INDEX
        ),
        N,
        False,
        1e-3,
    ),
    Case(
        "error_feedback(int4(64))",
        0.2,
        lambda i: N // 2 + 4 * (N // 64) + BESIDE,
        64,
        True,
    ),
    Case(
        "error_feedback(sparse_loco(64,256), 0.95)",
        1.5,
        lambda i: 12 * (64 + 16) + 16 + BESIDE,
        "refused",
    ),
    Case(
        "from_step(2,error_feedback(int8(64)))",
        0.014,
        lambda i: (4 * N + BESIDE, N + 4 * (N // 64) + BESIDE)[i],
    ),
]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.string)


PLAIN = [
    case for case in CASES if not case.string.startswith(("error_feedback", "from_"))
]
"""Those that are not around others of the list."""


def batch(step: int) -> dict[str, np.ndarray]:
    """Hidden states that change a little from step to step, and what is beside them."""
    base, new = (np.random.RandomState(seed).randn(B, L, D) for seed in (0, step + 1))
    return {
        "h": (base + 0.1 * new).astype(np.float32),
        "ids": np.random.RandomState(step).randint(0, 4000, (B, L)).astype(np.int32),
        "index": np.arange(5, 5 + B, dtype=np.int32),
        "mask": np.arange(L) < np.array(LENGTHS)[:, None],
    }


def given() -> dict[str, Any]:
    """A batch whose h is drawn, and whose ids come back also where padding does not."""
    arrays = batch(0)
    return arrays | alone() | {"ids": arrays["ids"] * arrays["mask"]}


def alone() -> dict[str, Any]:
    return {"h": jax.ShapeDtypeStruct((B, L, D), jnp.float32)}


def spec_of(arrays: Any) -> Any:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), arrays)


def difference(case: Case, arrays: Any, got: Any, name: str = "h") -> float:
    """Relative error, without padding where that does not cross."""
    pair = [np.asarray(each[name]).astype(np.float64) for each in (arrays, got)]
    if "pack_tokens" in case.string:
        pair = [each[arrays["mask"]] for each in pair]
    return np.linalg.norm(pair[1] - pair[0]) / np.linalg.norm(pair[0])


@functools.cache
def subject(string: str, make: Callable[[], Any] = given) -> conformance._Subject:
    """A codec on the arrays of `make`, compiled once for all tests."""
    codec = selector.as_selector(codecs.from_string(string))
    return conformance._Subject(codec, make())


def line_of(string: str, make: Callable[[], Any] = given) -> conformance._Line:
    """Both ends of a channel; the receiver is given bytes and an option's number."""
    return conformance._Line(subject(string, make))


def nbytes_of(sent: conformance._Sent) -> int:
    return sum(map(len, sent.buffers))


@functools.cache
def stream(case: Case) -> list[conformance._Sent]:
    """STEPS tensors that have crossed."""
    line = line_of(case.string)
    return [line.send(batch(step)) for step in range(STEPS)]


@each_case
def test_it_keeps_the_rules_of_every_codec(case, monkeypatch):
    """Shapes, types, what is no float, zeros, what is not finite, the same again."""
    made = subject(case.string)
    monkeypatch.setattr(conformance, "_Subject", lambda codec, given: made)
    found = codecs.check(codecs.from_string(case.string), given(), eager=case.eager)
    assert not found.broken


@each_case
def test_errors_and_bytes_on_the_wire_are_as_promised(case):
    for each in stream(case):
        error = difference(case, each.sent, each.got)
        assert error <= case.error
        assert nbytes_of(each) == case.nbytes(each.option)
    # A bound that is far too wide would show nothing.
    assert error >= case.error / 12
    options = selector.as_selector(codecs.from_string(case.string)).codecs
    largest = max(map(case.nbytes, range(len(options))))
    ratios = [codec_lib.ratio(each, spec_of(batch(0))) for each in options]
    assert max(ratios) == pytest.approx(largest / (4 * N + BESIDE))


@pytest.mark.parametrize("string", ["int8(row)", "int8(tensor)", "e3m0", "sparse_loco"])
def test_nan_among_thousands_of_values_does_not_become_a_number(string):
    """XLA's library of reductions, which takes over from 4,096 on, forgets NaN."""
    codec = codecs.from_string(string)
    arrays = np.random.RandomState(0).standard_normal((64, 64)).astype(np.float32)
    arrays[3, 3] = np.nan
    state = codec.init(arrays)
    payload, _ = jax.jit(codec.encode)(arrays, state)
    got, _ = jax.jit(codec.decode)(payload, state)
    assert np.isnan(got).any()


@each_case
def test_nan_and_inf_are_never_silently_finite(case):
    arrays = batch(0)
    arrays["h"][1, 2, 3], arrays["h"][6, 1, 5] = np.nan, -np.inf
    line = line_of(case.string)
    if case.bad == "refused":
        with pytest.raises(conformance._Refused, match=r"^h: nan is not finite"):
            line.send(arrays)
        return
    got = line.send(arrays).got["h"]
    if case.bad == 1:
        assert np.isnan(got[1, 2, 3])
        assert got[6, 1, 5] == -np.inf
        assert np.isfinite(got).sum() == N - 2
        return
    spread = np.zeros((B, L, D), bool)
    spread[1, 2, 3] = spread[6, 1, 5] = True
    groups = spread.reshape(-1, case.bad)
    groups[:] = groups.any(axis=1, keepdims=True)
    if "pack_tokens" in case.string:
        spread &= arrays["mask"][..., None]
    np.testing.assert_array_equal(np.isnan(got), spread)
    assert not np.isinf(got).any()


@pytest.mark.slow
@pytest.mark.parametrize("case", PLAIN, ids=lambda case: case.string)
def test_a_batch_sharded_over_four_devices_gives_the_same(case):
    rows = mesh_lib.batch_sharding(mesh_lib.make_mesh(jax.devices()))
    line = line_of(case.string)
    for step in range(2):
        got = line.send(jax.device_put(batch(step), rows)).got["h"]
        want = stream(case)[step].got["h"]
        np.testing.assert_allclose(
            got, want, rtol=0, atol=case.shards * np.abs(want).max()
        )


ELSEWHERE = """
import sys, jax, numpy as np
from nebula_jax.communication import codec as codec_lib, codecs
folder, *strings = sys.argv[1:]
tensors = np.load(f"{folder}/tensors.npy")
h = {"h": tensors[0]}
for number, string in enumerate(strings):
    codec = codecs.from_string(string)
    state = codec.init(h)
    if hasattr(state, "residual"):
        encode = jax.jit(codec.encode)
        for tensor in tensors:
            _, state = encode({"h": tensor}, state)
        np.savez(f"{folder}/{number}_got.npz", *state.residual)
        continue
    specs, structure = jax.tree.flatten(codec_lib.payload_spec(codec, h))
    buffers = np.load(f"{folder}/{number}.npz")
    leaves = [
        buffers[name].view(spec.dtype).reshape(spec.shape)
        for name, spec in zip(buffers.files, specs, strict=True)
    ]

    @jax.jit
    def step(payload, anchor):
        got, _ = codec.decode(payload, state)
        return jax.tree.map(lambda a, x: a - x, anchor, got), got

    moved, got = step(jax.tree.unflatten(structure, leaves), {"h": tensors[1]})
    np.savez(f"{folder}/{number}_got.npz", got=got["h"], moved=moved["h"])
"""


def test_another_process_has_the_same_bits_of_differences_and_of_feedback(tmp_path):
    """Each cluster decodes all payloads in its own program, where XLA optimizes fully,
    and within the step that uses the result: its anchor must be ours."""
    decoded = ("e3m0", "sparse_loco(16,256)")
    fed_back = ("error_feedback(int4(64))", "error_feedback(e3m0, 0.9)")
    tensors = np.stack([batch(step)["h"] for step in range(STEPS)])
    np.save(tmp_path / "tensors.npy", tensors)
    lines = {string: line_of(string, alone) for string in (*decoded, *fed_back)}
    wanted = []
    for number, line in enumerate(lines.values()):
        sent = [line.send({"h": tensor}) for tensor in tensors]
        buffers = [np.frombuffer(each, np.uint8) for each in sent[0].buffers]
        np.savez(tmp_path / f"{number}.npz", *buffers)
        wanted.append(sent[0].got["h"])
    done = children.python(
        "-c", ELSEWHERE, str(tmp_path), *lines, env=os.environ | {"XLA_FLAGS": ""}
    )
    assert done.returncode == 0, done.stderr
    for number, (string, line) in enumerate(lines.items()):
        found, want = np.load(tmp_path / f"{number}_got.npz"), wanted[number]
        if string in fed_back:
            np.testing.assert_array_equal(found["arr_0"], line.sender.residual[0])
            continue
        np.testing.assert_array_equal(found["got"].view("u4"), want.view("u4"))
        np.testing.assert_array_equal(found["moved"], tensors[1] - want)


def test_every_name_is_in_the_list():
    strings = "|".join(case.string for case in CASES)
    assert [name for name in codecs.NAMES if name not in strings] == []


def test_a_chain_equals_doing_it_by_hand():
    svd, int8, fp16 = (
        each._replace(encode=jax.jit(each.encode), decode=jax.jit(each.decode))
        for each in (codecs.svd(0.6), codecs.int8(64), codecs.fp16())
    )
    chained = codecs.chain(svd, int8, fp16)
    h = batch(0)["h"]
    payload, state = chained.encode(h, chained.init(h))
    factors, _ = svd.encode(h, ())
    codes, _ = int8.encode(factors, int8.init(factors))
    short, _ = fp16.encode(codes, ())
    jax.tree.map(np.testing.assert_array_equal, payload, short)
    by_hand = fp16.decode(short, ())[0]
    by_hand = svd.decode(int8.decode(by_hand, ())[0], ())[0]
    np.testing.assert_array_equal(chained.decode(payload, state)[0], by_hand)


def leaf_codec(encode, decode):
    return codecs.per_leaf(encode, lambda payload, like: decode(payload))


def counting(init, encode=lambda count: count + 1):
    return codec_lib.Codec(
        init, lambda x, n: (x, encode(n)), lambda x, n: (x, n), "counting"
    )


ONES = jnp.ones(())  # a constant: what a channel gives away is gone


OTHERS = (2.0**n for n in itertools.count())
"""What a program draws once and its operations by themselves at each call."""


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (
            codecs.stateless(lambda x: x, lambda x: x.astype(jnp.bfloat16)),
            "given float32[4, 77] and decodes bfloat16[4, 77]",
        ),
        (codecs.stateless(lambda x: {"x": x}, lambda x: x), "['x'] float32[4, 77]"),
        (
            counting(lambda spec: jnp.zeros((), jnp.int32), lambda n: n + 0.5),
            "the state of codec counting begins with int32[] and goes on with",
        ),
        (counting(lambda spec: ONES), "Array has been deleted"),
        (
            leaf_codec(lambda x: x[np.asarray(x)[:, 0] > 0], lambda p: p),
            "encoding or decoding fails: TracerArrayConversionError",
        ),
        (leaf_codec(lambda x: x + next(OTHERS), lambda p: p), "without jit its"),
        (leaf_codec(lambda x: x + 1, lambda p: p), "zeros do not come back as zeros"),
        (
            leaf_codec(lambda x: jnp.nan_to_num(x), lambda p: p),
            "nan comes back as 0: what is not finite must not become finite",
        ),
        (
            leaf_codec(lambda x: (jnp.sign(x), jnp.max(x)), lambda p: p[0] * p[1]),
            "beside inf, finite values come back as Inf",
        ),
        (leaf_codec(lambda x: x / 1e-39, lambda p: p), "do not come back finite"),
        (
            codec_lib.Codec(
                lambda spec: jnp.zeros(spec.shape),
                lambda x, mean: (x - mean, x + mean),
                lambda x, mean: (x + mean, x + 2 * mean),
            ),
            "after a tensor with NaN later ones are not finite either",
        ),
    ],
)
def test_each_rule_that_is_broken_is_told(broken, words):
    eager = "without jit" in words  # it takes many small programs
    found = codecs.check(broken, array_of(4, 77), eager=eager)
    assert words in "\n".join(found.broken)
    assert words in repr(found)


def test_integers_that_come_back_otherwise_are_told():
    spec = {"h": array_of(4, 77), "n": array_of(4, dtype=jnp.int32)}
    codec = codecs.stateless(
        lambda x: x, lambda x: x | {"n": jnp.zeros_like(x["n"])}, "forgets"
    )
    assert codecs.check(codec, spec, eager=False).broken == (
        "leaf ['n'] is no float, and did not come back as it was",
    )


def array_of(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def signs():
    """The codec of README.md."""

    def encode(x):
        size = jnp.mean(jnp.abs(x), axis=-1, keepdims=True)
        size = jnp.where(jnp.isfinite(size), size, jnp.nan)
        return {"bits": jnp.packbits(x > 0, axis=-1), "size": size}

    def decode(payload, like):
        bits = jnp.unpackbits(payload["bits"], axis=-1, count=like.shape[-1])
        return (2.0 * bits - 1) * payload["size"]

    return codecs.per_leaf(encode, decode, "signs")


@pytest.mark.parametrize(
    "make",
    [
        signs,
        lambda: codecs.chain(signs(), signs(), codecs.int8("row")),
        lambda: codecs.error_feedback(signs(), 0.9),
        lambda: codecs.chain(codecs.pack_tokens(), signs()),
        *(
            pytest.param(
                lambda case=case: codecs.from_string(case.string),
                marks=pytest.mark.slow,
            )
            for case in PLAIN
        ),
    ],
)
def test_codecs_work_on_any_tree_and_width(make):
    spec = {
        "h": array_of(3, 5, 77),
        "g": array_of(3, 5, 7, dtype=jnp.bfloat16),
        "mask": array_of(3, 5, dtype=jnp.bool_),
        "index": array_of(3, dtype=jnp.int32),
        "scalar": array_of(),
        "none": array_of(0, 77),
        "more": [array_of(1)],
    }
    found = codecs.check(make(), spec, eager=False)
    assert not found.broken
    assert found.error < 1.1
