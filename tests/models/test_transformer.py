import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_hand import attention, normalise

from nebula_jax.models import mixed_precision, transformer

CONFIG = transformer.Config(
    vocab_size=50, layers=2, width=16, heads=2, feed_forward=32, max_length=12
)


def erf(x):
    return np.vectorize(math.erf)(x)


def numpy_block(params, hidden, mask):
    """The oracle: a post-LN block written out in numpy."""
    own, rows = params["attention"], []
    for h, m in zip(hidden, mask, strict=True):
        attended = attention(h, h, m, own, own["output"])
        h = normalise(h + attended, params["attention_layer_norm"])
        inner = h @ params["intermediate"]["kernel"] + params["intermediate"]["bias"]
        inner = 0.5 * inner * (1 + erf(inner / np.sqrt(2)))
        outer = inner @ params["output"]["kernel"] + params["output"]["bias"]
        rows.append(normalise(h + outer, params["output_layer_norm"]))
    return np.stack(rows)


def init(module, *inputs):
    """Makes parameters with numpy: to compile a module's own `init` takes seconds."""
    make = functools.partial(module.init, jax.random.key(0), *inputs, True)
    random = np.random.RandomState(0)

    def leaf(path, spec):
        constant = {"scale": 1.0, "bias": 0.0}.get(path[-1].key)
        values = random.randn(*spec.shape) * spec.shape[0] ** -0.5
        return jnp.float32(
            values if constant is None else np.full(spec.shape, constant)
        )

    return jax.tree_util.tree_map_with_path(leaf, jax.eval_shape(make))


# Jitted: operation by operation it takes a test ten times as long.
def apply(module, params, hidden, mask):
    """Applies a module without dropout."""
    return jax.jit(lambda *args: module.apply(*args, True))(params, hidden, mask)


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
    params = init(block, hidden, mask)
    got = np.asarray(apply(block, params, hidden, mask))
    want = numpy_block(jax.tree.map(np.asarray, params["params"]), hidden, mask)
    # Not at padding: what stands there is never read.
    np.testing.assert_allclose(got[mask], want[mask], atol=2e-5)


apply_encoder = jax.jit(
    transformer.Encoder(CONFIG).apply, static_argnames="deterministic"
)


@pytest.fixture(scope="module")
def encoder_params(hidden, mask):
    return init(transformer.Encoder(CONFIG), hidden, mask)


def attended(mask, drop=lambda shares: shares):
    """Attention to four places, and the gradient of its squares."""
    random = np.random.RandomState(0)
    given = (random.randn(2, n, 2, 8).astype(np.float32) for n in (3, 4, 4))

    def loss(query, *memory):
        memory = transformer.KeyValues(*memory)
        out = transformer.attend(query, memory, mask, CONFIG, drop)
        return jnp.sum(out**2), out

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(*given)


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
    for start, end in ((0, 3), (3, 4), (4, 12)):
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
    """Embeddings of IDS, and the parameters' shapes."""
    module = transformer.Embeddings(config)
    params = init(module, IDS)["params"]
    # Not jitted: results are compared bit by bit, and two programs may round apart.
    embedded = module.apply({"params": params}, IDS, True, **arguments)
    return embedded, params, jax.tree.map(jnp.shape, params)


def test_foreign_embeddings_are_the_sum_of_three_tables_then_projected():
    config = dataclasses.replace(
        CONFIG, token_types=2, position_offset=2, embedding_width=6
    )
    types = np.asarray([[0, 0, 1, 1], [0, 1, 1, 1]], np.int32)
    got, params, shapes = embed(config, token_type_ids=types)
    assert shapes["position_embeddings"]["embedding"] == (14, 6)
    assert shapes["projection"] == {"kernel": (6, 16), "bias": (16,)}
    params = jax.tree.map(np.asarray, params)
    table = {name: each.get("embedding") for name, each in params.items()}
    total = (
        table["word_embeddings"][IDS]
        + table["position_embeddings"][2:6]
        + table["token_type_embeddings"][types]
    )
    normal = normalise(total, params["layer_norm"])
    want = normal @ params["projection"]["kernel"] + params["projection"]["bias"]
    np.testing.assert_allclose(got, want, atol=2e-5)


def test_without_token_type_ids_all_are_of_type_0():
    config = dataclasses.replace(CONFIG, token_types=2)
    got, _, _ = embed(config)
    want, _, _ = embed(config, token_type_ids=np.zeros_like(IDS))
    np.testing.assert_array_equal(got, want)


def test_epsilon_reaches_every_layer_norm(hidden, mask):
    loose = dataclasses.replace(CONFIG, layer_norm_epsilon=1e6)
    block = transformer.Block(loose)
    got = apply(block, init(block, hidden, mask), hidden, mask)
    assert np.abs(np.asarray(got)).max() < 0.01  # divided by a thousand
    assert np.abs(np.asarray(embed(loose)[0])).max() < 0.01


@pytest.mark.parametrize("dtype", transformer.DTYPES)
def test_matrices_rounded_once_give_the_same_bits(dtype):
    config = dataclasses.replace(CONFIG, dtype=dtype)
    block = transformer.Block(config)
    hidden = np.random.RandomState(1).randn(2, 5, 16).astype(np.float32)
    mask = np.arange(5)[None] < np.asarray([[5], [3]])
    params = init(block, hidden, mask)["params"]
    rounded = mixed_precision.cast_kernels(params, config.operands)
    kernels = {leaf.dtype for leaf in jax.tree.leaves(rounded) if leaf.ndim > 1}
    assert jnp.dtype(dtype) in kernels

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
    params = init(block, hidden, mask)["params"]

    def kept(params):
        given = {id(leaf) for leaf in jax.tree.leaves(params)}
        back = jax.vjp(lambda h: block.apply({"params": params}, h, mask, True), hidden)
        kept = [leaf for leaf in jax.tree.leaves(back[1]) if id(leaf) not in given]
        return sum(leaf.size for leaf in kept if leaf.dtype == jnp.bfloat16)

    kernels = 4 * 16 * 16 + 2 * 16 * 32
    assert (
        kept(params) - kept(mixed_precision.cast_kernels(params, config.operands))
        == kernels
    )


def test_activations_computed_again_give_the_same_gradient_and_are_not_kept():
    config = dataclasses.replace(CONFIG, dropout=0.5, layers=3)
    hidden = np.random.RandomState(1).randn(4, 8, 16).astype(np.float32)
    mask = np.ones((4, 8), bool)
    params = init(transformer.Encoder(config), hidden, mask)["params"]

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
