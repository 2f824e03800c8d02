import functools

import jax
import numpy as np
from token_rows import CLS, CONTROLS, MASK, PAD, SEP, UNK, rows

from nebula_jax.training import abnet as training
from nebula_jax.training import masking

LENGTHS = (10, 3, 7, 12)


IDS = rows(LENGTHS, 12)
KEYS = masking.example_keys(jax.random.key(0), np.asarray([7, 1, 9, 4]))
corrupt = jax.jit(functools.partial(training.targets_of, "cmlm"), static_argnums=(2, 3))
corrupt_span = jax.jit(masking.corrupt_span, static_argnames=("special", "policy"))


@functools.cache
def draws(count=2000, length=12):
    """Many corruptions of one row of `length` tokens."""
    keys = jax.random.split(jax.random.key(1), count)
    ids = np.tile(rows((length,), 12), (count, 1))
    targets = corrupt(keys, ids, CONTROLS, count * length)
    asked = np.zeros(ids.size, bool)
    positions = np.asarray(targets.positions)
    asked[positions[positions < ids.size]] = True
    return ids, np.asarray(targets.input_ids), asked.reshape(ids.shape)


def test_the_number_of_masks_is_uniform_and_control_pieces_are_spared():
    _, _, asked = draws()
    numbers = np.bincount(asked.sum(axis=1), minlength=12)
    assert numbers[0] == numbers[11] == 0
    np.testing.assert_allclose(numbers[1:11], 200, atol=60)  # 4 standard deviations
    assert not asked[:, [0, 11]].any()
    np.testing.assert_allclose(asked[:, 1:11].mean(axis=0), 0.55, atol=0.05)


def test_chosen_pieces_become_masks_or_others_or_stay():
    ids, seen, asked = draws()
    np.testing.assert_array_equal(ids[~asked], seen[~asked])
    np.testing.assert_allclose((seen[asked] == MASK).mean(), 0.8, atol=0.02)
    np.testing.assert_allclose((seen[asked] == ids[asked]).mean(), 0.1, atol=0.02)
    assert not np.isin(seen[asked], [PAD, UNK, CLS, SEP]).any()


def test_questions_are_where_tokens_were_chosen_with_the_true_answers():
    targets = corrupt(KEYS, IDS, CONTROLS, 40)
    positions = np.asarray(targets.positions)
    filled = positions < IDS.size
    assert 0 < filled.sum() < len(filled)
    assert (np.diff(positions[filled]) > 0).all()
    labels = np.asarray(targets.labels)
    np.testing.assert_array_equal(labels[filled], IDS.reshape(-1)[positions[filled]])
    assert (labels[~filled] == 0).all()
    np.testing.assert_array_equal(targets.attention_mask, IDS != PAD)
    assert targets.tokens == sum(LENGTHS)
    assert targets.dropped_targets == 0


def test_a_source_span_has_the_rates_length_and_often_an_end_of_the_sentence():
    count = 2000
    ids = np.tile(rows((12,), 12), (count, 1))  # 10 pieces: a span of 1 + 1
    keys = jax.random.split(jax.random.key(2), count)
    everything = masking.Policy(1.0, 0.0)
    seen = corrupt_span(keys, ids, special=CONTROLS, policy=everything)
    chosen = np.asarray(seen) == MASK
    assert (chosen.sum(axis=1) == 2).all()
    starts = np.bincount(chosen.argmax(axis=1), minlength=12)
    # 0.2 at each end, and 0.6 over nine starts.
    np.testing.assert_allclose(
        starts[1:10] / count,
        [0.2 + 0.6 / 9] + [0.6 / 9] * 7 + [0.2 + 0.6 / 9],
        atol=0.03,
    )


def test_autoregressive_inputs_are_labels_a_place_later():
    shift = jax.jit(functools.partial(training.targets_of, "ar"), static_argnums=(2, 3))
    targets = shift((), IDS, CONTROLS, 40)
    assert targets.input_ids.shape == (4, 11)
    positions = np.asarray(targets.positions)
    filled = positions < 44
    asked = [(p // 11, p % 11) for p in positions[filled]]
    assert asked == [(b, q) for b, n in enumerate(LENGTHS) for q in range(n - 1)]
    labels = np.asarray(targets.labels)[filled]
    for label, (b, q) in zip(labels, asked, strict=True):
        assert targets.input_ids[b, q] == IDS[b, q]
        assert label == IDS[b, q + 1]
    assert targets.dropped_targets == 0
