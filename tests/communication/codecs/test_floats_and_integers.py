import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from nebula_jax.communication import codecs
from nebula_jax.communication.codecs import integers


def through(codec, x):
    """Returns the arrays received, and the payload of each leaf."""
    payload, state = jax.jit(codec.encode)(x, codec.init(x))
    return jax.device_get(jax.jit(codec.decode)(payload, state)[0]), payload.tree


def test_fp16_rounds_as_numpy_does_and_clamps_what_is_finite():
    x = np.random.RandomState(0).randn(1000).astype(np.float32) * 1e3
    np.testing.assert_array_equal(through(codecs.fp16(), x)[0], x.astype(np.float16))
    edge = np.array([65504, 65519, 65520, 1e38, -1e38, np.inf, -np.inf, np.nan])
    got, _ = through(codecs.fp16(), edge.astype(np.float32))
    most = 65504.0
    want = [most, most, most, most, -most, np.inf, -np.inf, np.nan]
    np.testing.assert_array_equal(got, want)


def test_bf16_rounds_as_ml_dtypes_does_and_clamps_what_is_finite():
    x = np.random.RandomState(0).randn(1000).astype(np.float32)
    want = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(through(codecs.bf16(), x)[0], want)
    edge = np.array([np.finfo(np.float32).max, -np.inf, np.nan], np.float32)
    most = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
    np.testing.assert_array_equal(
        through(codecs.bf16(), edge)[0], np.array([most, -np.inf, np.nan], np.float32)
    )


def test_rounding_by_an_addition_is_rounding():
    random = np.random.RandomState(0)
    halves = np.arange(-300, 300) + 0.5
    wide = random.uniform(-(2**22) + 1, 2**22 - 1, 10_000)
    x = np.concatenate([halves, [-0.0, 1e-40], wide]).astype(np.float32)
    fast = jax.jit(integers._round_by_adding)(x)
    np.testing.assert_array_equal(fast, jnp.round(x).astype(jnp.int32))
    assert fast.dtype == jnp.int32


def groups_of(x, per):
    """The oracle's groups: zeros after the last block."""
    if per == "tensor":
        return x.reshape(1, -1)
    if per == "row":
        return x.reshape(-1, x.shape[-1])
    return np.pad(x.reshape(-1), (0, -x.size % per)).reshape(-1, per)


@pytest.mark.parametrize(
    ("name", "per"),
    [
        *(("int8", per) for per in ("tensor", "row", 8)),
        *(("int4", per) for per in ("row", 5, 1000)),
    ],
)
def test_integers_equal_quantization_by_hand(name, per):
    limit = {"int8": 127, "int4": 7}[name]
    x = np.random.RandomState(0).randn(6, 10).astype(np.float32)
    groups = groups_of(x, min(per, x.size) if isinstance(per, int) else per)
    scale = np.abs(groups).max(1) * np.float32(1 / limit)
    q = np.rint(groups * (1 / scale)[:, None]).astype(np.int8)
    got, payload = through(getattr(codecs, name)(per), x)
    np.testing.assert_array_equal(payload.scale, scale)
    flat = q.reshape(-1)[: x.size]
    if name == "int4":
        half = x.size // 2
        flat = ((flat[:half] & 15) | (flat[half:] << 4)).astype(np.uint8)
    np.testing.assert_array_equal(np.ravel(payload.data), flat)
    want = (q * scale[:, None]).reshape(-1)[: x.size].reshape(x.shape)
    np.testing.assert_array_equal(got, want)


def test_four_bits_come_back_from_any_number_of_groups():
    shapes = [(1, 6), (2, 6), (3, 6), (2, 5), (3, 5), (1, 5), (5,)]
    several = [np.random.RandomState(0).randint(-7, 8, each) for each in shapes]
    several = [x.astype(np.float32) for x in several]
    for x in several:
        x[..., 0] = 7  # so that the scale is 1
    received, payloads = through(codecs.int4("row"), several)
    for x, got, payload in zip(several, received, payloads, strict=True):
        np.testing.assert_allclose(got, x, rtol=1e-6)
        assert payload.data.size == -(-x.size // 2)
        q = np.pad(x.reshape(-1).astype(np.int8), (0, x.size % 2)).reshape(2, -1)
        np.testing.assert_array_equal(
            np.ravel(payload.data), ((q[0] & 15) | (q[1] << 4)).astype(np.uint8)
        )


def test_very_large_and_very_small_rows():
    x = np.array(
        [[3e38, -3e38, 0], [1e-30, -1e-30, 0], [3e-36, 3e-36, 0], [1e-40, 0, 0]],
        np.float32,
    )
    got, _ = through(codecs.int8("row"), x)
    np.testing.assert_allclose(got[:2], x[:2], rtol=1e-5)
    assert (np.abs(got[2, :2] - x[2, :2]) <= x[2, :2]).all()
    np.testing.assert_array_equal(got[:, 2], 0)
    np.testing.assert_array_equal(got[3], 0)
