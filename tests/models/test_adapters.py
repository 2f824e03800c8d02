import functools

import drawn
import jax
import numpy as np
from by_hand import attention, normalise

from nebula_jax.models import adapters, transformer

CONFIG = transformer.Config(
    vocab_size=50, layers=1, width=16, heads=2, feed_forward=32, max_length=12
)
RANDOM = np.random.RandomState(0)
HIDDEN = RANDOM.randn(2, 5, 16).astype(np.float32)
SOURCE = RANDOM.randn(2, 7, 24).astype(np.float32)  # PLM-S is wider than PLM-T
SOURCE_MASK = np.asarray([[1] * 7, [1] * 4 + [0] * 3], bool)
INPUTS = HIDDEN, SOURCE, SOURCE_MASK
ENCODER = adapters.EncoderAdapter(CONFIG, inner=6)
DECODER = adapters.DecoderAdapter(CONFIG, inner=6, heads=4, dropout=0.5)


def whole(module, hidden, source, mask, deterministic=True):
    """A decoder adapter with what it reads of the source."""
    return module(hidden, module.read(source), mask, deterministic)


@functools.partial(jax.jit, static_argnames="deterministic")
def decode(params, hidden, source, mask, deterministic=True, seed=0):
    inputs = hidden, source, mask, deterministic
    rngs = {"dropout": jax.random.key(seed)}
    return DECODER.apply({"params": params}, *inputs, method=whole, rngs=rngs)


def decoder_params():
    return jax.device_get(drawn.params(DECODER, *INPUTS, method=whole))


def silenced(params):
    """Parameters with which both sublayers say nothing."""
    last = ("attention_output", "output")
    return params | {name: jax.tree.map(np.zeros_like, params[name]) for name in last}


def test_an_encoder_adapter_is_eq_12():
    params = jax.device_get(drawn.params(ENCODER, HIDDEN))
    assert set(params) == {"layer_norm", "down", "up"}
    assert set(params["down"]) == set(params["up"]) == {"kernel"}  # no biases
    inner = normalise(HIDDEN, params["layer_norm"]) @ params["down"]["kernel"]
    want = HIDDEN + np.maximum(inner, 0) @ params["up"]["kernel"]
    found = jax.jit(ENCODER.apply)({"params": params}, HIDDEN)
    np.testing.assert_allclose(found, want, atol=1e-5)


def test_a_decoder_adapter_is_eq_13():
    params, rows = decoder_params(), []
    for x, source, mask in zip(*INPUTS, strict=True):
        attended = attention(x, source, mask, params, params["attention_output"])
        x = normalise(x + attended, params["attention_layer_norm"])
        inner = x @ params["intermediate"]["kernel"] + params["intermediate"]["bias"]
        outer = np.maximum(inner, 0) @ params["output"]["kernel"]
        x = x + outer + params["output"]["bias"]
        rows.append(normalise(x, params["output_layer_norm"]))
    np.testing.assert_allclose(decode(params, *INPUTS), np.stack(rows), atol=1e-5)


def test_dropout_is_of_what_sublayers_say():
    def drawn_twice(params):
        return [decode(params, *INPUTS, deterministic=False, seed=n) for n in (0, 1)]

    params = decoder_params()
    assert not np.allclose(*drawn_twice(params))
    np.testing.assert_array_equal(*drawn_twice(silenced(params)))


def test_output_projections_begin_as_xavier_times_the_scale():
    @jax.jit
    def init():
        silent = adapters.EncoderAdapter(CONFIG, inner=6, output_scale=0.0)
        keys = map(jax.random.key, range(3))
        return (
            silent.init(next(keys), HIDDEN)["params"]["up"],
            ENCODER.init(next(keys), HIDDEN)["params"]["up"],
            DECODER.init(next(keys), *INPUTS, method=whole)["params"]["output"],
        )

    zero, *others = (np.abs(each["kernel"]).max() for each in init())
    assert zero == 0
    # Glorot and Bengio: uniform in +-bound.
    bound = adapters.OUTPUT_SCALE * np.sqrt(6 / (6 + 16))
    assert all(0.8 * bound <= largest <= bound + 1e-7 for largest in others)


def test_a_matched_adapter_puts_back_what_its_layer_norms_take_away():
    """Exactly, where all tokens have one mean and deviation."""
    random = RANDOM.randn(3, 5, 16)
    said = normalise(random, {"scale": 0.6, "bias": 0.05}).astype(np.float32)
    params = silenced(decoder_params())

    def heard(params):
        source = np.zeros((3, 7, 24), np.float32)
        return decode(params, said, source, np.ones((3, 7), bool))

    matched = adapters.match_layer_norms(params, said)
    np.testing.assert_allclose(heard(matched), said, atol=1e-5)
    assert np.abs(heard(params) - said).mean() > 0.2
