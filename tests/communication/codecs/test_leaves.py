import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nebula_jax import errors
from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication import codecs, loopback
from nebula_jax.face import cut as face_cut
from nebula_jax.training import cut, partition

SPEC = jax.ShapeDtypeStruct((16, 77), jnp.float32)


def test_a_scalar_is_a_row_of_one_and_nothing_is_left_alone():
    shapes = []

    def encode(x):
        shapes.append(x.shape)
        return x

    codec = codecs.per_leaf(encode, lambda payload, like: payload)
    arrays = {
        "scalar": np.float32(3),
        "none": np.ones((0, 4), "f4"),
        "row": np.ones((2, 3), "f4"),
    }
    got, _ = codec.decode(codec.encode(arrays, ())[0], ())
    assert shapes == [(2, 3), (1,)]
    jax.tree.map(np.testing.assert_array_equal, got, arrays)


WRONG = codecs.stateless(lambda x: x, lambda x: jnp.pad(x, ((0, 0), (0, 3))), "pads")


@pytest.mark.parametrize("end", ["sender", "receiver"])
def test_a_channel_refuses_a_codec_that_gives_back_another_shape(end):
    words = (
        "channel h: codec pads was given float32[16, 77] and decodes float32[16, 80]"
    )
    with pytest.raises(errors.SettingsError, match=re.escape(words)):
        getattr(loopback.Loopback(), end)("h", SPEC, WRONG)


def test_so_does_a_cut_half():
    fine = codecs.fp16()
    for half in (
        cut.front(lambda params, x, rng: x, fine, WRONG),
        cut.back(lambda params, h, x, rng: h.sum(), WRONG, fine),
    ):
        with pytest.raises(errors.SettingsError, match="h: codec pads was given"):
            half.init_states(SPEC)


def test_a_channel_of_nothing_is_refused():
    with pytest.raises(errors.SettingsError, match="no array in what is to cross"):
        loopback.Loopback().sender("h", {}, codecs.identity())


@pytest.mark.parametrize(
    ("leaf", "words"),
    [
        (1.5, "['layers'][0] is no array but 1.5, of type float: write jnp"),
        (len, "of type builtin_function_or_method: leave out what is no array"),
        ("relu", "['layers'][0] is no array but 'relu', of type str"),
    ],
)
def test_a_leaf_that_is_no_array_is_named(leaf, words):
    tree = {"layers": [leaf], "x": jnp.ones(3)}
    for refused in (
        lambda: loopback.Loopback().sender("h", tree, codecs.fp16()),
        lambda: partition.split(tree, partition.train_all),
        lambda: face_cut.spec(lambda params, x, rng: tree, {}, jnp.ones(3)),
    ):
        with pytest.raises(errors.SettingsError, match=re.escape(words)):
            refused()


@pytest.mark.parametrize(
    ("string", "words"),
    [
        ("hadamard|int4(64)", "next to nothing to 77 columns: .* blocks of 1, .*as 80"),
        ("svd(1)", r"channel h: codec svd\(1, false\) saves nothing: it makes 5,952"),
    ],
)
def test_a_codec_that_does_nothing_on_these_arrays_says_so(string, words):
    with pytest.warns(codec_lib.CodecWarning, match=words):
        loopback.Loopback().sender("h", SPEC, codecs.from_string(string))


@pytest.mark.filterwarnings("error")
def test_a_codec_that_does_something_says_nothing():
    for string in ("", "int4(64)", "zstd", "hadamard|int4(64)", "from_step(3, fp16)"):
        wide = jax.ShapeDtypeStruct((16, 96), jnp.float32)
        loopback.Loopback().sender("h", wide, codecs.from_string(string))
