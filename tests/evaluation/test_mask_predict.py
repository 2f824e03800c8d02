import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_language import CLS, MASK, SEP, SPECIAL, TABLE, log_softmax, text

from nebula_jax.evaluation import decoding

# A toy masked language model: a piece depends on all pieces of the row.


def toy_logits(ids, table):
    place = np.arange(ids.shape[-1]).reshape(*[1] * (ids.ndim - 1), -1)
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


@pytest.mark.parametrize("iterations", [1, 10])
def test_mask_predict_is_abnets_loop(iterations):
    lengths = np.asarray([[3, 4, 7], [9, 8, 6], [5, 5, 5]], np.int32)
    search = functools.partial(
        decoding.mask_predict,
        toy_predict,
        special=SPECIAL,
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
    got = decoding.length_candidates(logits, 3)
    np.testing.assert_array_equal(got, [[5, 6, 4], [6, 4, 3]])
    np.testing.assert_array_equal(
        decoding.length_candidates(logits[:, :5], 4)[0, 2:], 3
    )
