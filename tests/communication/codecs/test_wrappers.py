import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication import codecs, selector


def gaussian(seed, shape=(4, 8)):
    return np.random.RandomState(seed).randn(*shape).astype(np.float32)


class Ends:
    """Both ends of a line, each with its own state."""

    def __init__(self, codec, spec):
        self.codec = codec = selector.as_selector(codec)
        self.sender, self.receiver = codec.init(spec), codec.init(spec)
        self.step = 0
        self.encoders = [jax.jit(each.encode) for each in codec.codecs]
        self.decoders = [jax.jit(each.decode) for each in codec.codecs]

    def send(self, arrays):
        self.step += 1
        self.option = self.codec.choose(arrays, self.sender, self.step)
        payload, self.sender = self.encoders[self.option](arrays, self.sender)
        arrays, self.receiver = self.decoders[self.option](payload, self.receiver)
        return arrays


@pytest.mark.parametrize("beta", [1, 0.9])
def test_error_feedback_is_numpys_top_k_with_memory(beta):
    """With beta below 1, the momentum of SparseLoCo."""
    ends = Ends(codecs.error_feedback(codecs.top_k(0.25), beta), gaussian(0))
    residual = np.zeros((4, 8), np.float32)
    for step in range(6):
        x = gaussian(step)
        want = x + np.float32(beta) * residual
        where = np.argsort(-np.abs(want.reshape(-1)), kind="stable")[:8]
        sent = np.zeros(32, np.float32)
        sent[where] = want.reshape(-1)[where]
        residual = want - sent.reshape(4, 8)
        np.testing.assert_array_equal(ends.send(x), sent.reshape(4, 8))
        np.testing.assert_array_equal(ends.sender.residual[0], residual)


def test_a_beta_of_1_changes_neither_the_name_nor_the_program():
    plain, one = (codecs.error_feedback(codecs.fp16(), *beta) for beta in ((), (1,)))
    assert plain.name == one.name == "error_feedback(fp16)"
    state = plain.init(gaussian(0))
    programs = [
        str(jax.make_jaxpr(each.encode)(gaussian(0), state)) for each in (plain, one)
    ]
    assert programs[0] == programs[1]


@pytest.mark.parametrize("beta", [0, -0.5, 1.5, float("nan"), True, "half"])
def test_wrong_betas_are_refused(beta):
    with pytest.raises(ValueError, match=r"^beta must be"):
        codecs.error_feedback(codecs.fp16(), beta)


@pytest.mark.parametrize(
    "string",
    [
        "top_k(0.1)|fp16",
        "int4(row)",
        "svd(0.25)",
        "bf16",
        "e3m0(8)",
        "sparse_loco(2, 8)",
    ],
)
def test_error_feedback_loses_nothing_in_the_long_run(string):
    """The sum received and the residual are the sum sent, to rounding."""
    ends = Ends(codecs.from_string(f"error_feedback({string})"), gaussian(0))
    xs = [gaussian(step) for step in range(20)]
    arrived = sum(np.asarray(ends.send(x), np.float64) for x in xs)
    (residual,) = ends.sender.residual
    assert np.abs(residual).max() > 1e-4
    np.testing.assert_allclose(arrived + residual, sum(xs), atol=1e-5)


def test_error_feedback_keeps_a_short_types_residual_in_float32():
    x = gaussian(0).astype(ml_dtypes.bfloat16)
    ends = Ends(codecs.error_feedback(codecs.top_k(0.5)), x)
    assert ends.send(x).dtype == jnp.bfloat16
    assert ends.sender.residual[0].dtype == jnp.float32


def batch(step, index, drift=0.1):
    """Examples that change a little each step, in numpy."""
    base = gaussian(99, (20, 6, 8))
    return {
        "h": base[index] + np.float32(drift) * gaussian(step, (len(index), 6, 8)),
        "ids": np.full((len(index), 6), step, np.int32),
        "index": np.array(index, np.int32),
    }


def test_delta_is_aq_sgd_as_numpy_writes_it():
    ends = Ends(codecs.delta(codecs.int8("row"), 20), batch(0, [0, 1, 2]))
    memory, options = {}, []
    for step, index in enumerate(
        ([0, 1, 2], [3, 4, 5], [2, 0, 1], [1, 3, 9], [1, 3, 9])
    ):
        sent = batch(step, index)
        got = ends.send(sent)
        options.append(ends.option)
        for row, example in enumerate(index):
            a = sent["h"][row]
            if options[-1] == 0:
                memory[example] = a
                continue
            d = a - memory[example]
            scale = np.abs(d).max(1, keepdims=True) * np.float32(1 / 127)
            memory[example] = memory[example] + np.rint(d / scale) * scale
        want = np.stack([memory[example] for example in index])
        np.testing.assert_allclose(got["h"], want, atol=1e-6)
        np.testing.assert_array_equal(got["ids"], sent["ids"])
        np.testing.assert_array_equal(got["index"], sent["index"])
    assert options == [0, 0, 1, 0, 1]


def test_delta_sends_in_full_again_what_came_out_bad():
    ends = Ends(codecs.delta(codecs.int8("row"), 20), batch(0, [0, 1]))
    bad = batch(1, [0, 1])
    bad["h"][1, 2, 3] = np.nan
    options = []
    for arrays in (batch(0, [0, 1]), bad, batch(2, [0, 7]), batch(3, [0, 1])):
        got = ends.send(arrays)
        options.append(ends.option)
    assert options == [0, 1, 0, 0]
    np.testing.assert_array_equal(got["h"], batch(3, [0, 1])["h"])


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ([3, 20], r"index 20 is not in \[0, 20\)"),
        ([-1, 3], r"index -1 is not in \[0, 20\)"),
        ([3, 4, 3], "index 3 is twice in one batch"),
        ([4, 3, 4, 3], "index 3 is twice in one batch"),
    ],
)
def test_delta_refuses_an_index_it_cannot_keep(index, words):
    codec = codecs.delta(codecs.fp16(), 20)
    arrays = batch(0, [0] * len(index)) | {"index": np.array(index, np.int32)}
    with pytest.raises(ValueError, match=words):
        codec.encode(arrays, codec.init(arrays))


@pytest.mark.parametrize("examples", [1, 2**31 - 1])
def test_delta_takes_few_examples_and_many(examples):
    state = codecs.delta(codecs.fp16(), examples).init
    spec = {"index": jax.ShapeDtypeStruct([1], "int32"), "h": gaussian(0)[:1]}
    seen = jax.eval_shape(state, spec).seen
    assert seen.shape == (examples,)


def test_delta_needs_an_index():
    with pytest.raises(ValueError, match="one leaf must be called 'index'; 0 are"):
        codecs.delta(codecs.fp16(), 20).init({"h": gaussian(0)})
    with pytest.raises(ValueError, match=r"'index' must be int32 \[B\], not float32"):
        codecs.delta(codecs.fp16(), 20).init({"index": gaussian(0)})
    for shape in ((), (2, 3)):
        index = np.zeros(shape, np.int32)
        with pytest.raises(ValueError, match=r"must be int32 \[B\], not int32 \["):
            codecs.delta(codecs.fp16(), 20).init({"index": index})


def test_delta_asks_the_codec_inside_which_of_its_options_to_use():
    codec = codecs.from_string("delta(pack_tokens(capacities=4)|int8(row), 20)")
    assert len(codec.codecs) == 5
    ends, options = Ends(codec, batch(0, [0, 1]) | {"mask": np.ones((2, 6), bool)}), []
    for real in (6, 1, 3, 6):
        arrays = batch(0, [0, 1]) | {"mask": np.arange(6) < np.full((2, 1), real)}
        ends.send(arrays)
        options.append(ends.option)
    assert options == [0, 1, 2, 4]


def test_from_step_begins_at_its_step_however_many_tensors_there_were():
    x = gaussian(0)
    for n in (1, 2, 4):
        codec = codecs.from_step(n, codecs.error_feedback(codecs.fp16()))
        state = codec.init(x)
        options = []
        for step in (1, 1, 2, 3, 3, 4, 9):
            payload, state = codec.encode(x, state, step)
            options.append(payload.option)
        assert options == [int(step >= n) for step in (1, 1, 2, 3, 3, 4, 9)]
    assert codecs.from_step(2, codecs.fp16()).encode(x, ())[0].option == 0


def test_wrappers_in_wrappers():
    string = "from_step(2, delta(pack_tokens|error_feedback(int8(row)), 20))"
    with pytest.raises(codecs.CodecError, match="must be the first of its chain"):
        codecs.from_string("delta(fp16|pack_tokens, 20)")
    codec = codecs.from_string(string)
    arrays = batch(0, [0, 1]) | {"mask": np.ones((2, 6), bool)}
    ends = Ends(codec, arrays)
    options = []
    for _ in range(4):
        got = ends.send(arrays)
        options.append(ends.option)
    assert options == [0, 1, 9, 9]
    np.testing.assert_allclose(got["h"], arrays["h"], atol=1e-3)


def test_from_steps_options_are_its_own_and_then_those_of_the_codec_inside():
    codec = codecs.from_step(2, codecs.delta(codecs.fp16(), 20))
    ends, options = Ends(codec, batch(0, [0, 1])), []
    for seed in range(3):  # whole, whole for the first time in delta, a difference
        ends.send(batch(seed, [0, 1]))
        options.append(ends.option)
    assert options == [0, 1, 2]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: codecs.error_feedback("fp16"), "codec must be a codec such as fp16"),
        (lambda: codecs.delta(codecs.fp16(), 0), "examples must be 1 to"),
        (lambda: codecs.delta(codecs.fp16(), 2**31), "not 2147483648"),
        (lambda: codecs.delta(codecs.fp16(), 5, ""), "index must be a leaf's name"),
        (lambda: codecs.from_step(0, codecs.fp16()), "n must be a positive integer"),
    ],
)
def test_wrong_arguments_are_told(call, words):
    with pytest.raises(ValueError, match=words):
        call()


IN_STEP = """
import jax, numpy as np
from nebula_jax.communication import codecs, selector
for string in (
    "delta(int4(64), 9)",
    "delta(bf16, 9)",
    "error_feedback(int4(64))",
    "error_feedback(e3m0, 0.9)",
):
    here = selector.as_selector(codecs.from_string(string))
    index = np.arange(8, dtype=np.int32)
    random = np.random.RandomState(0)
    h = random.randn(8, 16, 256).astype(np.float32)
    eager = sender = receiver = here.init({"h": h, "index": index})
    for step in range(4):
        h = h + np.float32(0.1) * random.randn(*h.shape).astype(np.float32)
        arrays = {"h": h, "index": index}
        this = here.codecs[here.choose(arrays, sender, 1)]
        payload, eager = this.encode(arrays, eager)
        payload, sender = jax.jit(this.encode)(arrays, sender)
        got, receiver = jax.jit(this.decode)(payload, receiver)
        jax.tree.map(np.testing.assert_array_equal, sender, eager)
        if hasattr(sender, "values"):
            np.testing.assert_array_equal(sender.values[0], receiver.values[0])
            np.testing.assert_array_equal(sender.values[0][:8], got["h"])
"""


def test_both_ends_stay_equal_in_fully_optimized_programs():
    """In a process of its own: here, XLA's optimizations are turned down."""
    environment = os.environ | {"XLA_FLAGS": ""}
    done = subprocess.run(
        [sys.executable, "-c", IN_STEP], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_a_sender_keeps_no_more_than_it_must():
    codec = codecs.delta(codecs.fp16(), 20)
    state = codec.init(batch(0, [0, 1]))
    assert codec_lib.nbytes(state) == 20 * 6 * 8 * 4 + 20


def test_by_step_uses_another_codec_in_each_step_with_its_own_state():
    memory = codecs.error_feedback(codecs.top_k(0.25))
    tokens = codecs.from_string("from_step(3, fp16)")
    codec = selector.by_step([memory, tokens], lambda step: step % 2)
    ends = Ends(codec, gaussian(0))
    alone = Ends(memory, gaussian(0))
    options = []
    for step in range(1, 7):
        x = gaussian(step)
        got = ends.send(x)
        options.append(ends.option)
        if step % 2:
            np.testing.assert_array_equal(got, x if step < 3 else x.astype("f2"))
        else:
            np.testing.assert_array_equal(got, alone.send(x))
    assert options == [1, 0, 2, 0, 2, 0]
