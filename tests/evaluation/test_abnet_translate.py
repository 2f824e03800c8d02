import functools

import drawn
import jax
import jax.numpy as jnp
import numpy as np
from toy_language import PIECES, SPECIAL, text

from nebula_jax.evaluation import abnet_translate
from nebula_jax.models import abnet, transformer
from nebula_jax.training import abnet as training

# ABNet in nano size.

PLM = transformer.Config(
    vocab_size=8, layers=1, width=8, heads=2, feed_forward=8, max_length=9
)
SOURCE_MASK = np.asarray([[1] * 5, [1] * 3 + [0] * 2], bool)


def model(objective):
    config = abnet.Config(PLM, PLM, objective, 4, 4, heads=2, max_target_length=9)
    ids, hidden = np.zeros((1, 9), np.int32), np.zeros((1, 9, 8), np.float32)
    params = drawn.params(abnet.Target(config), ids, ids == 0, hidden, ids == 0)
    params["mlm_head"]["bias"] = jnp.asarray([9, 0, 0, 0.5, 0, 0, 0.5, 1.0])
    random = np.random.RandomState(0)
    encoded = abnet.Encoded(
        random.randn(2, 5, 8).astype(np.float32), random.randn(2, 10)
    )
    return config, params, encoded


def test_beam_search_scores_are_the_uncached_models():
    """Translations scored again, whole, by the function that training uses."""
    config, params, encoded = model("ar")
    shift = jax.jit(functools.partial(training.targets_of, "ar"), static_argnums=(2, 3))
    translate = jax.jit(abnet_translate.by_beam_search, static_argnums=(0, 4, 5))
    found = translate(config, params, encoded, SOURCE_MASK, SPECIAL, 3)
    targets = shift((), found.ids, SPECIAL, 16)
    rows = targets.input_ids, targets.attention_mask, encoded.hidden, SOURCE_MASK
    decode = jax.jit(abnet.decode, static_argnums=0)
    logits = decode(config, params, *rows, targets.positions)
    log_probs = np.asarray(jax.nn.log_softmax(logits))
    total = np.zeros(2)
    for own, place, label in zip(
        log_probs, *jax.device_get((targets.positions, targets.labels)), strict=True
    ):
        if place < 16:
            total[place // 8] += own[label]
    lengths = np.sum(np.asarray(found.ids) != SPECIAL.pad, axis=-1) - 1
    np.testing.assert_allclose(
        found.scores, total / ((5 + lengths) / 6) ** 1.1, atol=1e-5
    )


def test_mask_predict_translates_into_pieces_alone():
    config, params, encoded = model("cmlm")
    translate = jax.jit(abnet_translate.by_mask_predict, static_argnums=(0, 4, 5, 6))
    found = translate(config, params, encoded, SOURCE_MASK, SPECIAL, 2, 3)
    for row in np.asarray(found.ids):
        assert set(text(row)[:-1]) <= set(PIECES)
    assert np.isfinite(found.scores).all()


def test_the_best_piece_is_the_same_by_chunks(monkeypatch):
    config, params, _ = model("cmlm")
    random = np.random.RandomState(1)
    hidden = random.randn(11, 8).astype(np.float32)
    wanted = random.rand(11) < 0.7
    monkeypatch.setattr(abnet_translate, "CHUNK", 3)
    best_pieces = jax.jit(abnet_translate.best_pieces, static_argnums=(0, 4))
    best, own = best_pieces(config, params, hidden, wanted, SPECIAL)

    @jax.jit
    def all_log_probs(params):
        target = abnet.Target(config)
        return jax.nn.log_softmax(
            target.apply({"params": params}, hidden, method="logits")
        )

    log_probs, best, own = map(np.asarray, (all_log_probs(params), best, own))
    np.testing.assert_array_equal(best[wanted], log_probs[wanted, 5:].argmax(-1) + 5)
    np.testing.assert_allclose(own[wanted], log_probs[wanted, 5:].max(-1), atol=1e-5)
