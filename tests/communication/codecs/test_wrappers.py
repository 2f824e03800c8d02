import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from nebula_jax.communication import codecs, selector


def gaussian(seed, shape=(4, 8)):
    return np.random.RandomState(seed).randn(*shape).astype(np.float32)


class Ends:
    """Both ends of a line, each with its own state."""

    def __init__(self, codec, spec):
        self.codec = codec = selector.compiled(codec)
        self.sender, self.receiver = codec.init(spec), codec.init(spec)
        self.step = 0

    def send(self, arrays):
        self.step += 1
        sent, self.sender = self.codec.encode(arrays, self.sender, self.step)
        self.option = sent.option
        arrays, self.receiver = self.codec.decode(sent, self.receiver)
        return arrays


@pytest.mark.parametrize("beta", [1, 0.9])
def test_error_feedback_is_numpys_rounding_with_memory(beta):
    """With beta below 1, the momentum of SparseLoCo."""
    ends = Ends(codecs.error_feedback(codecs.fp16(), beta), gaussian(0))
    residual = np.zeros((4, 8), np.float32)
    for step in range(6):
        x = gaussian(step)
        want = x + np.float32(beta) * residual
        sent = want.astype(np.float16).astype(np.float32)
        residual = want - sent
        np.testing.assert_array_equal(ends.send(x), sent)
        np.testing.assert_array_equal(ends.sender.residual[0], residual)


@pytest.mark.parametrize("string", ["int4(row)", "svd(0.25)", "sparse_loco(2, 8)"])
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
    ends = Ends(codecs.error_feedback(codecs.int4("row")), x)
    assert ends.send(x).dtype == jnp.bfloat16
    assert ends.sender.residual[0].dtype == jnp.float32


def batch(seed):
    return {"h": gaussian(seed, (2, 6, 8)), "ids": np.full((2, 6), seed, np.int32)}


def test_from_step_begins_at_its_step_however_many_tensors_there_were():
    x = gaussian(0)
    for n in (1, 2, 4):
        codec = codecs.from_step(n, codecs.error_feedback(codecs.fp16()))
        state = codec.init(x)
        for step in (1, 1, 2, 3, 3, 4, 9):
            assert codec.choose(x, state, step) == (step >= n)
    assert codecs.from_step(2, codecs.fp16()).encode(x, ())[0].option == 0


def test_wrappers_in_wrappers():
    codec = codecs.from_string("from_step(2, error_feedback(pack_tokens|int8(row)))")
    arrays = batch(0) | {"mask": np.arange(6) < np.array([[6], [3]])}
    ends, options = Ends(codec, arrays), []
    for real in (6, 6, 1, 6):
        arrays |= {"mask": np.arange(6) < np.full((2, 1), real)}
        got = ends.send(arrays)
        options.append(ends.option)
    assert options == [0, 8, 1, 8]
    want = arrays["h"] * np.where(np.arange(6) < 1, 1, 2)[:, None]  # others were lost
    np.testing.assert_allclose(got["h"], want, atol=0.1)
