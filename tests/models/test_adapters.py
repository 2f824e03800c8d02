import functools

import jax
import numpy as np
import pytest
from by_hand import attention, normalise

from nebula_jax.models import adapters, transformer

CONFIG = transformer.Config(
    vocab_size=50, layers=1, width=16, heads=2, feed_forward=32, max_length=12
)
RANDOM = np.random.RandomState(0)
HIDDEN = RANDOM.randn(2, 5, 16).astype(np.float32)
SOURCE = RANDOM.randn(2, 7, 24).astype(np.float32)  # PLM-S is wider than PLM-T
SOURCE_MASK = np.asarray([[1] * 7, [1] * 4 + [0] * 3], bool)


def encoder_adapter(scale=1.0):
    adapter = adapters.EncoderAdapter(CONFIG, inner=6, output_scale=scale)
    return adapter, jax.jit(adapter.init)(jax.random.key(0), HIDDEN)["params"]


@functools.cache
def decoder_adapter(scale=1.0, dropout=0.0):
    adapter = adapters.DecoderAdapter(
        CONFIG, inner=6, heads=4, dropout=dropout, output_scale=scale
    )

    def whole(module, hidden, source, mask):
        return module(hidden, module.read(source), mask, dropout == 0)

    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    init = jax.jit(functools.partial(adapter.init, method=whole))
    params = init(rngs, HIDDEN, SOURCE, SOURCE_MASK)["params"]
    jitted = jax.jit(functools.partial(adapter.apply, method=whole))

    def apply(params, hidden=HIDDEN, source=SOURCE, mask=SOURCE_MASK, seed=0):
        rngs = {"dropout": jax.random.key(seed)}
        args = ({"params": params}, hidden, source, mask)
        return np.asarray(jitted(*args, rngs=rngs))

    return apply, params


def randomised(params, seed=0):
    """Biases and layer norms as after training, not at their trivial beginning."""
    random = np.random.RandomState(seed)
    return jax.tree.map(
        lambda leaf: np.asarray(leaf) + 0.3 * random.randn(*leaf.shape), params
    )


def test_an_encoder_adapter_is_eq_12():
    adapter, params = encoder_adapter()
    assert set(params) == {"layer_norm", "down", "up"}
    assert set(params["down"]) == set(params["up"]) == {"kernel"}  # no biases
    params = randomised(params)
    inner = normalise(HIDDEN, params["layer_norm"]) @ params["down"]["kernel"]
    want = HIDDEN + np.maximum(inner, 0) @ params["up"]["kernel"]
    np.testing.assert_allclose(
        jax.jit(adapter.apply)({"params": params}, HIDDEN), want, atol=1e-5
    )


def test_a_decoder_adapter_is_eq_13():
    apply, params = decoder_adapter()
    params = randomised(params)
    rows = []
    for x, source, mask in zip(HIDDEN, SOURCE, SOURCE_MASK, strict=True):
        attended = attention(x, source, mask, params, params["attention_output"])
        x = normalise(x + attended, params["attention_layer_norm"])
        inner = x @ params["intermediate"]["kernel"] + params["intermediate"]["bias"]
        outer = np.maximum(inner, 0) @ params["output"]["kernel"]
        x = x + outer + params["output"]["bias"]
        rows.append(normalise(x, params["output_layer_norm"]))
    np.testing.assert_allclose(apply(params), np.stack(rows), atol=1e-5)


def test_dropout_is_of_what_sublayers_say():
    apply, params = decoder_adapter(dropout=0.5)
    assert not np.allclose(apply(params, seed=0), apply(params, seed=1))
    silent = dict(params)
    for name in ("attention_output", "output"):
        silent[name] = jax.tree.map(np.zeros_like, silent[name])
    np.testing.assert_array_equal(apply(silent, seed=0), apply(silent, seed=1))


@pytest.mark.parametrize("scale", [0.0, 0.1, 1.0])
def test_output_projections_begin_as_xavier_times_the_scale(scale):
    bound = np.sqrt(6 / (6 + 16))  # Glorot and Bengio: uniform in +-bound
    _, encoder = encoder_adapter(scale)
    _, decoder = decoder_adapter(scale)
    for own in (encoder["up"], decoder["output"]):
        largest = np.abs(np.asarray(own["kernel"])).max()
        assert 0.8 * scale * bound <= largest <= scale * bound + 1e-7


def test_a_matched_adapter_puts_back_what_its_layer_norms_take_away():
    """Exactly, where all tokens have one mean and deviation."""
    random = RANDOM.randn(3, 5, 16)
    said = normalise(random, {"scale": 0.6, "bias": 0.05}).astype(np.float32)
    apply, params = decoder_adapter(scale=0.0)
    source = np.zeros((3, 7, 24), np.float32)

    def heard(params):
        return apply(params, said, source, np.ones((3, 7), bool))

    np.testing.assert_allclose(
        heard(adapters.match_layer_norms(params, said)), said, atol=1e-5
    )
    assert np.abs(heard(params) - said).mean() > 0.2
