import dataclasses
import functools
import math

import drawn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_hand import attention, normalise

from nebula_jax.models import mixed_precision, transformer
from nebula_jax.training import residuals

CONFIG = transformer.Config(
    vocab_size=50,
    layers=2,
    width=16,
    heads=2,
    feed_forward=32,
    max_length=12,
    layer_norm_epsilon=0.2,  # so large that it shows
)


def erf(x):
    return np.vectorize(math.erf)(x)


def normal(x, params):
    return normalise(x, params, CONFIG.layer_norm_epsilon)


def numpy_block(params, hidden, mask):
    """The oracle: a post-LN block written out in numpy."""
    own, rows = params["attention"], []
    for h, m in zip(hidden, mask, strict=True):
        attended = attention(h, h, m, own, own["output"])
        h = normal(h + attended, params["attention_layer_norm"])
        inner = h @ params["intermediate"]["kernel"] + params["intermediate"]["bias"]
        inner = 0.5 * inner * (1 + erf(inner / np.sqrt(2)))
        outer = inner @ params["output"]["kernel"] + params["output"]["bias"]
        rows.append(normal(h + outer, params["output_layer_norm"]))
    return np.stack(rows)


# Jitted: operation by operation it takes a test ten times as long.
def apply(module, params, hidden, mask):
    """Applies a module without dropout."""
    jitted = jax.jit(
        lambda params, *args: module.apply({"params": params}, *args, True)
    )
    return jitted(params, hidden, mask)


@pytest.fixture(scope="module")
def hidden():
    return np.random.RandomState(0).randn(3, 12, 16).astype(np.float32)


@pytest.fixture(scope="module")
def mask():
    mask = np.ones((3, 12), bool)
    mask[1, 7:] = False
    mask[2, 3:] = False
    return mask


def test_a_block_is_the_textbooks(hidden, mask):
    block = transformer.Block(CONFIG)
    params = drawn.params(block, hidden, mask, True)
    got = np.asarray(apply(block, params, hidden, mask))
    want = numpy_block(jax.tree.map(np.asarray, params), hidden, mask)
    # Not at padding: what stands there is never read.
    np.testing.assert_allclose(got[mask], want[mask], atol=2e-5)


apply_encoder = jax.jit(
    transformer.Encoder(CONFIG).apply, static_argnames="deterministic"
)


@pytest.fixture(scope="module")
def encoder_params(hidden, mask):
    return {"params": drawn.params(transformer.Encoder(CONFIG), hidden, mask, True)}


def attended(mask, drop=lambda shares: shares):
    """Attention to four places, and the gradient of its squares."""
    random = np.random.RandomState(0)
    given = (random.randn(2, n, 2, 8).astype(np.float32) for n in (3, 4, 4))

    def loss(query, key, value, mask):
        memory = transformer.KeyValues(key, value)
        out = transformer.attend(query, memory, mask, CONFIG, drop)
        return jnp.sum(out**2), out

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(*given, mask)


def test_a_row_of_padding_is_finite():
    grads, out = attended(np.zeros((2, 4), bool))
    assert all(np.isfinite(leaf).all() for leaf in (*grads, out))


def test_what_is_dropped_are_shares_of_attention():
    mask = np.ones((2, 4), bool)
    want = 2 * attended(mask)[1]
    np.testing.assert_allclose(attended(mask, lambda shares: 2 * shares)[1], want)


def test_a_cache_filled_piece_by_piece_gives_what_the_whole_gives(
    encoder_params, hidden
):
    causal = np.asarray(transformer.causal_mask(12))
    want = apply_encoder(encoder_params, hidden, causal, deterministic=True)
    cache = transformer.empty_cache(CONFIG, 3, 12)
    for start, end in ((0, 6), (6, 12)):  # token by token: test_abnet.py
        got, cache = apply_encoder(
            encoder_params,
            hidden[:, start:end],
            causal[:, start:end],
            deterministic=True,
            cache=cache,
            position=start,
        )
        np.testing.assert_allclose(got, want[:, start:end], atol=1e-5)


IDS = np.asarray([[3, 7, 1, 0], [9, 9, 2, 4]], np.int32)


def embed(config, **arguments):
    """Embeddings of IDS, and the parameters."""
    module = transformer.Embeddings(config)
    params = drawn.params(module, IDS, True)
    # Not jitted: results are compared bit by bit, and two programs may round apart.
    embedded = module.apply({"params": params}, IDS, True, **arguments)
    return embedded, params


def test_foreign_embeddings_are_the_sum_of_three_tables_then_projected():
    config = dataclasses.replace(
        CONFIG, token_types=2, position_offset=2, embedding_width=6
    )
    types = np.asarray([[0, 0, 1, 1], [0, 1, 1, 1]], np.int32)
    got, params = embed(config, token_type_ids=types)
    assert params["position_embeddings"]["embedding"].shape == (14, 6)
    params = jax.tree.map(np.asarray, params)
    table = {name: each.get("embedding") for name, each in params.items()}
    total = (
        table["word_embeddings"][IDS]
        + table["position_embeddings"][2:6]
        + table["token_type_embeddings"][types]
    )
    summed = normal(total, params["layer_norm"])
    want = summed @ params["projection"]["kernel"] + params["projection"]["bias"]
    np.testing.assert_allclose(got, want, atol=2e-5)


def test_matrices_rounded_once_give_the_same_bits():
    config = dataclasses.replace(CONFIG, dtype="bfloat16")
    block = transformer.Block(config)
    hidden = np.random.RandomState(1).randn(2, 5, 16).astype(np.float32)
    mask = np.arange(5)[None] < np.asarray([[5], [3]])
    params = drawn.params(block, hidden, mask, True)
    rounded = mixed_precision.cast_kernels(params, config.operands)
    kernels = {leaf.dtype for leaf in jax.tree.leaves(rounded) if leaf.ndim > 1}
    assert jnp.dtype("bfloat16") in kernels

    def pull(params):
        out, back = jax.vjp(
            lambda h: block.apply({"params": params}, h, mask, True), hidden
        )
        return out, back(out)

    for ours, theirs in zip(
        jax.tree.leaves(jax.jit(pull)(rounded)),
        jax.tree.leaves(jax.jit(pull)(params)),
        strict=True,
    ):
        assert ours.dtype == theirs.dtype == jnp.float32
        np.testing.assert_array_equal(ours, theirs)


def test_rounded_matrices_are_no_residuals():
    """What a backward pass needs of a frozen matrix is the matrix as it was given."""
    config = dataclasses.replace(CONFIG, dtype="bfloat16")
    block = transformer.Block(config)
    hidden = jnp.zeros((1, 4, 16))
    mask = jnp.ones((1, 4), bool)
    params = drawn.params(block, hidden, mask, True)

    def residuals_of(params):
        apply = functools.partial(block.apply, {"params": params})
        _, pullback = jax.vjp(lambda h: apply(h, mask, True), hidden)
        return residuals.of(pullback, params).kept

    def kept(params):
        leaves = jax.eval_shape(residuals_of, params)
        return sum(leaf.size for leaf in leaves if leaf.dtype == jnp.bfloat16)

    kernels = 4 * 16 * 16 + 2 * 16 * 32
    assert (
        kept(params) - kept(mixed_precision.cast_kernels(params, config.operands))
        == kernels
    )


def test_activations_computed_again_give_the_same_gradient_and_are_not_kept():
    config = dataclasses.replace(CONFIG, dropout=0.5, layers=1)
    hidden = np.random.RandomState(1).randn(4, 8, 16).astype(np.float32)
    mask = np.ones((4, 8), bool)
    params = drawn.params(transformer.Encoder(config), hidden, mask, True)

    def pulled(remat):
        encoder = transformer.Encoder(dataclasses.replace(config, remat=remat))

        def apply(params):
            rngs = {"dropout": jax.random.key(0)}
            return encoder.apply({"params": params}, hidden, mask, False, rngs=rngs)

        out, back = jax.jit(lambda params: jax.vjp(apply, params))(params)
        kept = sum(leaf.size for leaf in jax.tree.leaves(back))
        (grads,) = jax.jit(lambda back, cotangent: back(cotangent))(back, hidden)
        return out, grads, kept

    (*kept, most), (*again, least) = pulled(False), pulled(True)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), again, kept)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
    # A block's input alone is kept, with the parameters.
    assert least - parameters < (most - parameters) / 4
