import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from toy_language import CLS, PIECES, SEP, SPECIAL, TABLE, log_softmax, text

from nebula_jax.evaluation import decoding

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


def toy_search(sentences, beams, max_length=5):
    state = jnp.asarray(np.repeat(sentences, beams), jnp.int32)
    search = functools.partial(
        decoding.beam_search,
        toy_step,
        batch_size=len(sentences),
        special=SPECIAL,
        max_length=max_length,
        beams=beams,
    )
    return jax.device_get(jax.jit(search)(state))


def test_a_beam_of_all_prefixes_finds_the_best_of_all_sentences():
    sentences = np.arange(6) * 11
    found = toy_search(sentences, beams=40)
    everything = [
        (*pieces, SEP)
        for n in (1, 2, 3)
        for pieces in itertools.product(PIECES, repeat=n)
    ]
    for sentence, ids, score in zip(sentences, *found, strict=True):
        scores = {
            ids: toy_log_prob(sentence, ids) / ((5 + len(ids)) / 6) ** 1.1
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
        lambda state: decoding.beam_search(toy_step, state, 1, SPECIAL, 9, beams=2)
    )
    for n in range(8):
        found = jax.device_get(alone(state[n]))
        np.testing.assert_array_equal(found.ids[0], together.ids[n])
        np.testing.assert_allclose(found.scores[0], together.scores[n], rtol=1e-6)
