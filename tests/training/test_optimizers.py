import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import traverse_util

from nebula_jax.data import tokenizers
from nebula_jax.models import (
    abnet,
    abnet_params,
    classifier,
    masked_lm,
    pretrained,
    transformer,
)
from nebula_jax.training import abnet as training
from nebula_jax.training import optimizers, partition


@pytest.mark.parametrize(
    ("step", "rate"), [(0, 0.0), (5, 0.5), (10, 1.0), (55, 0.5), (100, 0.0)]
)
def test_the_learning_rate_rises_then_falls_to_zero(step, rate):
    schedule = optimizers.linear_decay(1.0, warmup_steps=10, total_steps=100)
    assert schedule(step) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("step", "rate"),
    [
        (0, 1e-7),
        (2000, (1e-7 + 5e-4) / 2),
        (4000, 5e-4),
        (16_000, 2.5e-4),
        (400_000, 5e-5),
    ],
)
def test_the_learning_rate_falls_with_the_root_of_the_step(step, rate):
    schedule = optimizers.inverse_square_root()
    assert schedule(step) == pytest.approx(rate, rel=1e-5)


def test_two_steps_are_adams_by_hand():
    optimizer = optimizers.adam(lambda step: 0.1)
    params = {"w": jnp.asarray([1.0, -2.0])}
    state = optimizer.init(params)
    m = v = np.zeros(2)
    want = np.asarray([1.0, -2.0])
    for t, g in enumerate((np.asarray([0.5, 2.0]), np.asarray([-1.0, 1.0])), start=1):
        updates, state = optimizer.update({"w": jnp.asarray(g)}, state, params)
        params = {"w": params["w"] + updates["w"]}
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        want = want - 0.1 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-6)
    np.testing.assert_allclose(params["w"], want, rtol=1e-5)


@pytest.mark.parametrize(("warmup", "steps"), [(0, 7), (3, 7), (10, 100), (7, 7)])
def test_progress_has_the_shape_of_the_steps(warmup, steps):
    by_step = optimizers.linear_decay(1.0, warmup, steps)
    for step in range(steps + 1):
        found = optimizers.rise_and_fall(jnp.float32(step / steps), warmup / steps)
        assert float(found) == pytest.approx(float(by_step(step)), abs=1e-6)


D, H, K = 6, 2, 4
SHAPES = {
    "encoder/layer_0/attention/query/kernel": ((D, H, K), (D, H * K)),
    "encoder/layer_0/attention/output/kernel": ((H, K, D), (H * K, D)),
    "encoder/layer_1/intermediate/kernel": ((D, 12), (D, 12)),
    "encoder/layer_1/output/kernel": ((12, D), (12, D)),
    "adapter_0/down/kernel": ((D, 3), (D, 3)),
}
OTHERS = {
    "embeddings/word_embeddings/embedding": (10, D),
    "embeddings/projection/kernel": (4, D),
    "mlm_head/dense/kernel": (D, D),
    "encoder/layer_0/attention/query/bias": (H, K),
    "encoder/layer_0/output_layer_norm/scale": (D,),
}


def test_muon_takes_hidden_matrices_as_they_multiply():
    """Against optax's on matrices of two axes, and its Adam on all others."""
    random = np.random.RandomState(0)
    shapes = {path: shape for path, (shape, _) in SHAPES.items()} | OTHERS
    tree = lambda flat: traverse_util.unflatten_dict(flat, sep="/")  # noqa: E731
    params, grads = (
        {
            path: random.randn(*shape).astype(np.float32)
            for path, shape in shapes.items()
        }
        for _ in range(2)
    )
    ours = optimizers.muon(lambda step: 0.1, weight_decay=0.5)
    updates, _ = jax.jit(ours.update)(
        tree(grads), ours.init(tree(params)), tree(params)
    )
    updates = traverse_util.flatten_dict(updates, sep="/")

    muon = optax.contrib.muon(0.1, eps=1e-6, weight_decay=0.5, consistent_rms=0.2)
    flat = [
        {path: each[path].reshape(shape) for path, (_, shape) in SHAPES.items()}
        for each in (params, grads)
    ]
    want, _ = jax.jit(muon.update)(flat[1], muon.init(flat[0]), flat[0])
    for path, update in want.items():
        found = updates[path].reshape(update.shape)
        np.testing.assert_allclose(found, update, atol=1e-5, err_msg=path)

    adam = optax.nadamw(0.1, eps=1e-6, weight_decay=0.0)
    flat = [{path: each[path] for path in OTHERS} for each in (params, grads)]
    want, _ = adam.update(flat[1], adam.init(flat[0]), flat[0])
    for path, update in want.items():
        np.testing.assert_allclose(updates[path], update, atol=1e-6, err_msg=path)


SHAPE = transformer.Config(
    vocab_size=40, layers=1, width=8, heads=2, feed_forward=16, max_length=8
)
NARROW = dataclasses.replace(SHAPE, embedding_width=4)
TRANSLATOR = abnet.Config(
    source=NARROW,
    target=SHAPE,
    objective="cmlm",
    encoder_inner=4,
    decoder_inner=4,
    heads=2,
    dropout=0.0,
    max_target_length=8,
)
DECAYING = {"kernel", "embedding", "length_table"}
"""Every parameter of ours but biases and layer norms."""


def electra_params(model):
    ids, slots = jnp.zeros((1, 8), jnp.int32), jnp.zeros((1, 2), jnp.int32)
    return model(SHAPE).init(jax.random.key(0), ids, ids == 0, slots)["params"]


def classifier_params():
    special = tokenizers.SpecialTokens(0, 1, 2, 3, 4, 5)
    encoder = electra_params(masked_lm.Discriminator)
    params = {part: encoder[part] for part in ("embeddings", "encoder")}
    config = classifier.Config(SHAPE, special)
    model = pretrained.Pretrained("bert", SHAPE, params, {})
    return classifier.init(config, jax.random.key(0), model)


TREES = {
    "generator": lambda: electra_params(masked_lm.MaskedLM),
    "discriminator": lambda: electra_params(masked_lm.Discriminator),
    "source": lambda: abnet_params.init_source(TRANSLATOR, jax.random.key(0)),
    "target": lambda: abnet_params.init_target(TRANSLATOR, jax.random.key(0)),
    "head": lambda: training.init_head(NARROW, jax.random.key(0)),
    "classifier": classifier_params,
}
FORMS = {
    "nested": lambda tree: tree,
    "split": lambda tree: partition.split(tree, lambda path: "embedding" not in path),
    "paths": lambda tree: traverse_util.flatten_dict(tree, sep="/"),
    "tuples": traverse_util.flatten_dict,
}


@pytest.mark.parametrize(
    ("model", "form"),
    [(model, "nested") for model in TREES]
    + [("source", form) for form in [*FORMS][1:]],
)
def test_weight_decay_spares_biases_and_layer_norms_of_every_model(model, form):
    """Those of queries, keys and values too, which are [H, K]."""
    shapes = FORMS[form](jax.eval_shape(TREES[model]))
    # As many axes as theirs; of one size, which is soon compiled.
    params = jax.tree.map(lambda leaf: np.ones([1] * leaf.ndim, np.float32), shapes)
    zero = jax.tree.map(np.zeros_like, params)
    optimizer = optimizers.adam(lambda step: 0.1, weight_decay=0.5)
    updates, _ = optimizer.update(zero, optimizer.init(params), params)
    for path, update in jax.tree_util.tree_flatten_with_path(updates)[0]:
        name = re.findall(r"\w+", jax.tree_util.keystr(path))[-1]
        want = -0.05 if name in DECAYING else 0.0
        assert want or name in ("bias", "scale"), name
        np.testing.assert_allclose(update, want, rtol=1e-6, err_msg=str(path))


@pytest.mark.parametrize(
    ("path", "factor"),
    [
        ("classifier/output/kernel", 1.0),
        ("encoder/layer_11/output/kernel", 0.8),
        ("encoder/layer_10/attention/query/bias", 0.8**2),
        ("encoder/layer_0/output_layer_norm/scale", 0.8**12),
        ("embeddings/word_embeddings/embedding", 0.8**13),
        ("embeddings/layer_norm/bias", 0.8**13),
    ],
)
def test_factors_are_ernies(path, factor):
    """algorithms.md, section 5: lr d^(n-i), embeddings d^(n+1), classifier d^0."""
    assert optimizers.layer_factor(path, 0.8, layers=12) == pytest.approx(factor)


def test_a_step_is_adams_times_the_factor():
    params = {
        "embeddings": {"word_embeddings": {"embedding": jnp.ones((3, 2))}},
        "encoder": {f"layer_{n}": {"output": {"kernel": jnp.ones(2)}} for n in (0, 1)},
        "classifier": {"output": {"bias": jnp.ones(3)}},
    }
    grads = jax.tree.map(lambda leaf: leaf * 0.3, params)
    plain = optimizers.adam(lambda step: 0.1)
    decayed = optax.chain(plain, optimizers.scale_by_layer(0.5, layers=2))
    want, _ = plain.update(grads, plain.init(params), params)
    got, _ = decayed.update(grads, decayed.init(params), params)
    got, want = (traverse_util.flatten_dict(each, sep="/") for each in (got, want))
    for path, update in got.items():
        factor = optimizers.layer_factor(path, 0.5, layers=2)
        np.testing.assert_allclose(update, want[path] * factor, rtol=1e-6)
