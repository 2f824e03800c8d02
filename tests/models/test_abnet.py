import dataclasses
import functools

import drawn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nebula_jax.models import (
    abnet,
    abnet_params,
    adapters,
    bottleneck,
    masked_lm,
    transformer,
)
from nebula_jax.training import partition

SOURCE = transformer.Config(
    vocab_size=40, layers=2, width=24, heads=2, feed_forward=32, max_length=16
)
TARGET = transformer.Config(
    vocab_size=30,
    layers=2,
    width=16,
    heads=2,
    feed_forward=32,
    max_length=12,
    token_types=2,
)
shape = functools.partial(
    abnet.Config, SOURCE, TARGET, encoder_inner=8, decoder_inner=8, max_target_length=12
)
CMLM, AR = shape(objective="cmlm"), shape(objective="ar")
RANDOM = np.random.RandomState(0)
# Jitted, as in use: operation by operation they take a test ten times as long.
encode = jax.jit(abnet.encode, static_argnums=0)


@functools.partial(jax.jit, static_argnums=0)
def everywhere(config, params, *rows):
    return abnet.Target(config).apply({"params": params}, *rows)


X = RANDOM.randint(5, 40, (2, 7)).astype(np.int32)
X_MASK = np.asarray([[1] * 7, [1] * 4 + [0] * 3], bool)
Y = RANDOM.randint(5, 30, (2, 6)).astype(np.int32)
Y_MASK = np.asarray([[1] * 6, [1] * 5 + [0]], bool)


@pytest.fixture(scope="module")
def source_params():
    return drawn.params(abnet.Source(CMLM), X, X_MASK)


@pytest.fixture(scope="module")
def target_params():
    inputs = Y, Y_MASK, np.zeros((2, 7, 24), np.float32), X_MASK
    return drawn.params(abnet.Target(CMLM), *inputs, seed=1)


@pytest.fixture(scope="module")
def hidden():
    return RANDOM.randn(2, 7, 24).astype(np.float32)


def pad(values, by=3, fill=0):
    widths = [(0, 0), (0, by)] + [(0, 0)] * (values.ndim - 2)
    return np.pad(values, widths, constant_values=fill)


def test_source_interleaves_frozen_layers_and_adapters(source_params):
    """Eq. 12 by hand, layer by layer, with the length token in front."""

    @jax.jit
    def by_hand(p):
        h = transformer.Embeddings(SOURCE).apply({"params": p["embeddings"]}, X, True)
        h = jnp.concatenate([jnp.tile(p["length_table"][0], (2, 1, 1)), h], axis=1)
        mask = np.concatenate([np.ones((2, 1), bool), X_MASK], axis=1)
        adapter = adapters.EncoderAdapter(SOURCE, 8)
        for layer in range(2):
            frozen = {"params": p["encoder"][f"layer_{layer}"]}
            h = transformer.Block(SOURCE).apply(frozen, h, mask, True)
            h = adapter.apply({"params": p[f"adapters_{layer}"]}, h)
        return h[:, 1:], h[:, 0] @ p["length_table"].T

    encoded = encode(CMLM, source_params, X, X_MASK)
    hidden, logits = by_hand(source_params)
    assert hidden.shape == (2, 7, 24)
    np.testing.assert_allclose(encoded.hidden, hidden, atol=1e-5)
    np.testing.assert_allclose(encoded.length_logits[:, 1:], logits[:, 1:], atol=1e-5)
    assert np.isneginf(encoded.length_logits[:, 0]).all()  # no sentence is empty


def test_an_autoregressive_source_has_no_length_head(source_params):
    shapes = jax.eval_shape(lambda: abnet_params.init_source(AR, jax.random.key(0)))
    assert shapes.keys() == source_params.keys() - {"length_table"}
    params = {name: source_params[name] for name in shapes}
    encoded = jax.eval_shape(functools.partial(abnet.encode, AR), params, X, X_MASK)
    assert encoded.length_logits is None


def test_target_interleaves_frozen_layers_and_adapters(target_params, hidden):
    """Eq. 13 by hand, layer by layer, and then the MLM head."""

    @jax.jit
    def by_hand(p):
        h = transformer.Embeddings(TARGET).apply({"params": p["embeddings"]}, Y, True)
        adapter = adapters.DecoderAdapter(TARGET, 8, 4, 0.1)
        for layer in range(2):
            frozen = {"params": p["encoder"][f"layer_{layer}"]}
            h = transformer.Block(TARGET).apply(frozen, h, Y_MASK, True)
            own = {"params": p[f"adapters_{layer}"]}
            read = adapter.apply(own, hidden, method="read")
            h = adapter.apply(own, h, read, X_MASK, True)
        table = p["embeddings"]["word_embeddings"]["embedding"]
        return masked_lm.MLMHead(TARGET).apply({"params": p["mlm_head"]}, h, table)

    got = everywhere(CMLM, target_params, Y, Y_MASK, hidden, X_MASK)
    assert got.shape == (2, 6, 30)
    np.testing.assert_allclose(got, by_hand(target_params), atol=1e-5)


def test_more_padding_gives_the_same_logits(target_params, hidden):
    want = everywhere(CMLM, target_params, Y, Y_MASK, hidden, X_MASK)
    padded = (pad(Y), pad(Y_MASK), pad(hidden, fill=9.0), pad(X_MASK))
    got = everywhere(CMLM, target_params, *padded)
    np.testing.assert_allclose(got[:, :6][Y_MASK], want[Y_MASK], atol=1e-5)


def test_cached_decoding_equals_uncached(target_params, hidden):
    """Token by token, two hypotheses a sentence: so no token sees a later one."""
    target = abnet.Target(AR)
    variables = {"params": target_params}
    ids = RANDOM.randint(5, 30, (4, 6)).astype(np.int32)
    twice = (hidden.repeat(2, 0), X_MASK.repeat(2, 0))
    want = everywhere(AR, target_params, ids, np.ones_like(ids, bool), *twice)
    memory = jax.jit(functools.partial(target.apply, method="read"))(variables, hidden)

    def step(cache, now):
        position, tokens = now
        logits, cache = target.apply(
            variables, tokens, position, cache, memory, X_MASK, method="step"
        )
        return cache, logits

    # More places in the cache than there are tokens: those not written are not read.
    cache = transformer.empty_cache(TARGET, 4, 9)
    _, got = jax.lax.scan(step, cache, (np.arange(6), ids.T))
    np.testing.assert_allclose(got.transpose(1, 0, 2), want, atol=1e-5)


def test_a_pretrained_model_fits_in_as_it_is(source_params, target_params):
    for params, config in ((source_params, SOURCE), (target_params, TARGET)):
        model = drawn.masked_language_model(config)
        filled = abnet_params.with_pretrained(CMLM, params, model)
        assert filled["embeddings"] is model["embeddings"]
        assert filled["encoder"] is model["encoder"]
        assert jax.tree.map(jnp.shape, filled) == jax.tree.map(jnp.shape, params)
        # A source asks no masked language model.
        assert ("mlm_head" in filled) == (config is TARGET)


def test_silent_adapters_leave_the_pretrained_model_nearly_as_it_was(
    target_params, hidden
):
    """That is why output projections begin small and layer norms matched."""
    # Frozen layer norms with a scale that is not 1, as in BERT.
    model = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf * 0.5 if path[-1].key == "scale" else leaf,
        drawn.masked_language_model(TARGET),
    )
    positions = np.tile(np.arange(6, dtype=np.int32), (2, 1))
    apply = jax.jit(masked_lm.MaskedLM(TARGET).apply)
    want = np.asarray(apply({"params": model}, Y, Y_MASK, positions))

    def error(params):
        got = everywhere(CMLM, params, Y, Y_MASK, hidden, X_MASK)
        return np.abs(got - want).mean() / np.abs(want).mean()

    silent = dict(target_params)
    for layer in ("adapters_0", "adapters_1"):
        last = {"attention_output", "output"}
        silent[layer] = {
            name: jax.tree.map(np.zeros_like, own) if name in last else own
            for name, own in target_params[layer].items()
        }
    matched = abnet_params.with_pretrained(CMLM, silent, model)
    unmatched = silent | {part: model[part] for part in model}
    assert error(matched) < 0.5 * error(unmatched)


def test_the_gradient_of_frozen_parameters_is_never_made(target_params, hidden):
    """No product of the gradient's program has a frozen matrix's shape."""
    trained, frozen = partition.split(target_params, abnet_params.is_trained)

    def loss(trained, hidden):
        params = partition.merge(trained, frozen)
        logits = abnet.Target(CMLM).apply({"params": params}, Y, Y_MASK, hidden, X_MASK)
        return jnp.sum(logits**2)

    grads, hidden_grad = jax.jit(jax.grad(loss, argnums=(0, 1)))(trained, hidden)
    assert jax.tree.structure(grads) == jax.tree.structure(trained)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(grads["adapters_0"]))
    assert np.abs(hidden_grad).max() > 0
    program = jax.make_jaxpr(jax.grad(loss))(trained, hidden)
    made = {
        variable.aval.shape
        for equation in program.jaxpr.eqns
        if equation.primitive.name == "dot_general"
        for variable in equation.outvars
    }
    assert (8, 16) in made or (16, 8) in made  # the adapters' own feed-forward
    assert not made & {(16, 32), (32, 16), (30, 16), (16, 30)}


def test_the_papers_adapters_have_the_papers_size():
    """ABNet: 10.24 M parameters on the encoder side, 37.84 M on the decoder side, with
    1024 rows in the length table, and adapters whose inner width is 512."""
    bert = functools.partial(transformer.config_of_size, "base", max_length=512)

    def count(init, layers):
        plms = (bert(vocab_size=size, layers=layers) for size in (250_002, 30_522))
        config = abnet.Config(*plms, max_target_length=1023)
        shapes = jax.eval_shape(functools.partial(init, config), jax.random.key(0))
        trained, _ = partition.split(shapes, abnet_params.is_trained)
        return sum(leaf.size for leaf in jax.tree.leaves(trained))

    def millions(init):
        """Of 12 layers, which are alike: to trace all of them takes seconds."""
        return (11 * count(init, 2) - 10 * count(init, 1)) / 1e6

    assert millions(abnet_params.init_source) == pytest.approx(10.24, abs=0.01)
    assert millions(abnet_params.init_target) == pytest.approx(37.84, abs=0.01)


def approximated(hidden, start):
    return (hidden - start.mean) @ start.down @ start.up + start.mean


def test_a_bottleneck_begins_as_the_translator_with_the_approximation(
    source_params, target_params
):
    config = dataclasses.replace(CMLM, bottleneck=5)
    hidden = np.asarray(encode(CMLM, source_params, X, X_MASK).hidden)
    start = bottleneck.start(bottleneck.moments(hidden, X_MASK), 5)
    want = everywhere(
        CMLM, target_params, Y, Y_MASK, approximated(hidden, start), X_MASK
    )
    narrow = abnet_params.narrowed_source(source_params, start)
    sent = encode(config, narrow, X, X_MASK)
    assert sent.hidden.shape == (2, 7, 5)
    np.testing.assert_array_equal(
        sent.length_logits, encode(CMLM, source_params, X, X_MASK).length_logits
    )
    readers = abnet_params.narrowed_target(target_params, start)
    got = everywhere(config, readers, Y, Y_MASK, sent.hidden, X_MASK)
    np.testing.assert_allclose(got, want, atol=1e-4)
