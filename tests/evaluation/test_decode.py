import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nebula_jax.data import tokenizers
from nebula_jax.evaluation import decode
from nebula_jax.models import abnet, abnet_params, transformer
from nebula_jax.training import abnet_losses

CONTROLS = tokenizers.SpecialTokens(0, 1, 2, 3, 4, size=8)
PAD, UNK, CLS, SEP, MASK = CONTROLS[:5]
PIECES = (5, 6, 7)
TABLE = np.random.RandomState(0).randn(97, 8).astype(np.float32) * 1.5


def log_softmax(logits):
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


# A toy language model: the next piece depends on the sentence and on all before it.


def toy_hash(state, token, position):
    return (state * 31 + token * 7 + position * 3) % 97


def toy_step(tokens, position, state):
    state = toy_hash(state, tokens, position)
    return jnp.asarray(TABLE)[state], state


def toy_log_prob(sentence, ids):
    """Of y_1 ... y_n [SEP] in a sentence's toy model."""
    total, state = 0.0, sentence
    for position, (token, following) in enumerate(itertools.pairwise((CLS, *ids))):
        state = toy_hash(state, token, position)
        total += log_softmax(TABLE[state])[following]
    return total


def toy_search(sentences, beams, alpha=1.1, max_length=5):
    state = jnp.asarray(np.repeat(sentences, beams), jnp.int32)
    search = functools.partial(
        decode.beam_search,
        toy_step,
        batch_size=len(sentences),
        controls=CONTROLS,
        max_length=max_length,
        beams=beams,
        alpha=alpha,
    )
    return jax.device_get(jax.jit(search)(state))


def text(row):
    """y_1 ... y_n [SEP] of a padded row."""
    end = list(row).index(SEP)
    assert row[0] == CLS
    assert (row[end + 1 :] == PAD).all()
    return tuple(int(token) for token in row[1 : end + 1])


@pytest.mark.parametrize("alpha", [0.0, 1.1])
def test_a_beam_of_all_prefixes_finds_the_best_of_all_sentences(alpha):
    sentences = np.arange(6) * 11
    found = toy_search(sentences, beams=40, alpha=alpha)
    everything = [
        (*pieces, SEP)
        for n in (1, 2, 3)
        for pieces in itertools.product(PIECES, repeat=n)
    ]
    for sentence, ids, score in zip(sentences, *found, strict=True):
        scores = {
            ids: toy_log_prob(sentence, ids) / ((5 + len(ids)) / 6) ** alpha
            for ids in everything
        }
        best = max(scores, key=scores.get)
        assert text(ids) == best
        np.testing.assert_allclose(score, scores[best], rtol=1e-4)


def test_a_beam_of_one_is_greedy_search():
    sentences = np.arange(6) * 11
    found = toy_search(sentences, beams=1, max_length=7)
    for sentence, row in zip(sentences, found.ids, strict=True):
        ids, state = [CLS], sentence
        while ids[-1] != SEP:
            state = toy_hash(state, ids[-1], len(ids) - 1)
            allowed = PIECES if len(ids) == 1 else (*PIECES, SEP)
            if len(ids) == 6:
                allowed = (SEP,)
            ids.append(max(allowed, key=lambda token: TABLE[state][token]))
        assert text(row) == tuple(ids[1:])


def test_a_sentence_is_translated_alike_in_every_batch():
    """Also when it is done long before the others."""
    sentences = np.arange(8) * 5
    together = toy_search(sentences, beams=2, max_length=9)
    assert len({len(text(row)) for row in together.ids}) > 1
    state = jnp.asarray(np.repeat(sentences, 2), jnp.int32).reshape(8, 2)
    alone = jax.jit(
        lambda state: decode.beam_search(toy_step, state, 1, CONTROLS, 9, beams=2)
    )
    for n in range(8):
        found = jax.device_get(alone(state[n]))
        np.testing.assert_array_equal(found.ids[0], together.ids[n])
        np.testing.assert_allclose(found.scores[0], together.scores[n], rtol=1e-6)


# A toy masked language model: a piece depends on all pieces of the row.


def toy_logits(ids, table):
    place = np.arange(ids.shape[-1])
    mixed = (ids * (place + 3) ** 2).sum(-1, keepdims=True)
    return table[(mixed + 13 * place) % 97]


def toy_predict(ids, wanted):
    log_probs = jax.nn.log_softmax(toy_logits(ids, jnp.asarray(TABLE))[..., 5:])
    best = jnp.argmax(log_probs, axis=-1).astype(jnp.int32) + 5
    # What is not wanted must not be used.
    return jnp.where(wanted, best, 99), jnp.where(wanted, log_probs.max(-1), 99.0)


def masked_by_hand(length, iterations):
    """One hypothesis, with lists: ABNet's loop."""
    n = length - 2
    ids = np.asarray([CLS, *[MASK] * n, SEP])
    log_probs = {place: 0.0 for place in range(1, n + 1)}
    masked = list(log_probs)
    for i in range(iterations + 1):
        if i:
            number = max(1, n * (iterations - i) // iterations)
            masked = sorted(log_probs, key=log_probs.get)[:number]
        ids[masked] = MASK
        # Padding counts in the toy's row of 9, as it is 0.
        choice = log_softmax(toy_logits(ids, TABLE)[..., 5:])
        for place in masked:
            ids[place] = 5 + choice[place].argmax()
            log_probs[place] = choice[place].max()
    return tuple(ids), sum(log_probs.values()) / ((5 + length - 1) / 6) ** 1.1


@pytest.mark.parametrize("iterations", [1, 4, 10])
def test_mask_predict_is_abnets_loop(iterations):
    lengths = np.asarray([[3, 4, 7], [9, 8, 6], [5, 5, 5]], np.int32)
    search = functools.partial(
        decode.mask_predict,
        toy_predict,
        controls=CONTROLS,
        max_length=9,
        iterations=iterations,
    )
    found = jax.device_get(jax.jit(search)(lengths))
    for row, ids, score in zip(lengths, *found, strict=True):
        by_hand = [masked_by_hand(length, iterations) for length in row]
        want, want_score = max(by_hand, key=lambda pair: pair[1])
        np.testing.assert_allclose(score, want_score, rtol=1e-4)
        assert (CLS, *text(ids)) == want


def test_length_candidates_are_the_likeliest_that_are_no_shorter_than_a_piece():
    logits = np.asarray([[-np.inf, 9, 8, 1, 2, 4, 3], [-np.inf, 0, 0, 5, 6, 1, 7]])
    got = decode.length_candidates(logits, 3)
    np.testing.assert_array_equal(got, [[5, 6, 4], [6, 4, 3]])
    np.testing.assert_array_equal(decode.length_candidates(logits[:, :5], 4)[0, 2:], 3)


# ABNet in nano size.

PLM = transformer.Config(
    vocab_size=8, layers=1, width=8, heads=2, feed_forward=8, max_length=9
)
SOURCE_MASK = np.asarray([[1] * 5, [1] * 3 + [0] * 2], bool)


def model(objective):
    config = abnet.Config(
        PLM, PLM, objective, 4, 4, heads=2, output_scale=2.0, max_target_length=9
    )
    init = jax.jit(abnet_params.init_target, static_argnums=0)
    params = init(config, jax.random.key(0))
    params["mlm_head"]["bias"] = jnp.asarray([9, 0, 0, 0.5, 0, 0, 0.5, 1.0])
    random = np.random.RandomState(0)
    encoded = abnet.Encoded(
        random.randn(2, 5, 8).astype(np.float32), random.randn(2, 10)
    )
    return config, params, encoded


def test_beam_search_scores_are_the_uncached_models():
    """Translations scored again, whole, by the function that training uses."""
    config, params, encoded = model("ar")
    translate = jax.jit(decode.translate_ar, static_argnums=(0, 4, 5))
    found = translate(config, params, encoded, SOURCE_MASK, CONTROLS, 3)
    questions = abnet_losses.autoregressive(found.ids, CONTROLS, slots=16)
    logits = jax.jit(abnet.decode, static_argnums=0)(
        config,
        params,
        questions.input_ids,
        questions.attention_mask,
        encoded.hidden,
        SOURCE_MASK,
        questions.positions,
    )
    log_probs = np.asarray(jax.nn.log_softmax(logits))
    total = np.zeros(2)
    for own, place, label in zip(
        log_probs, questions.positions, questions.labels, strict=True
    ):
        if place < 16:
            total[place // 8] += own[label]
    lengths = np.asarray(abnet_losses.lengths(found.ids, CONTROLS)) - 1
    np.testing.assert_allclose(
        found.scores, total / ((5 + lengths) / 6) ** 1.1, atol=1e-5
    )


def test_mask_predict_translates_into_pieces_alone():
    config, params, encoded = model("cmlm")
    translate = jax.jit(decode.translate_cmlm, static_argnums=(0, 4, 5, 6))
    found = translate(config, params, encoded, SOURCE_MASK, CONTROLS, 2, 3)
    for row in np.asarray(found.ids):
        assert set(text(row)[:-1]) <= set(PIECES)
    assert np.isfinite(found.scores).all()


def test_the_best_piece_is_the_same_by_chunks(monkeypatch):
    config, params, _ = model("cmlm")
    random = np.random.RandomState(1)
    hidden = random.randn(11, 8).astype(np.float32)
    wanted = random.rand(11) < 0.7
    monkeypatch.setattr(decode, "CHUNK", 3)
    best, own = decode.best_pieces(config, params, hidden, wanted, CONTROLS)
    logits = abnet.Target(config).apply({"params": params}, hidden, method="logits")
    log_probs = np.asarray(jax.nn.log_softmax(logits))
    np.testing.assert_array_equal(best[wanted], log_probs[wanted, 5:].argmax(-1) + 5)
    np.testing.assert_allclose(own[wanted], log_probs[wanted, 5:].max(-1), atol=1e-5)
