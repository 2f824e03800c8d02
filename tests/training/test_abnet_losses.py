import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nebula_jax.data import tokenizers
from nebula_jax.models import abnet, abnet_params, transformer
from nebula_jax.training import abnet_losses, losses, masking, partition

# XLM-R's order, with [MASK] last: nothing may rely on control pieces coming first.
CONTROLS = tokenizers.SpecialTokens(1, 3, 0, 2, 59, size=60)
PAD, UNK, CLS, SEP, MASK = CONTROLS[:5]
LENGTHS = (10, 3, 7, 12)


def rows(lengths=LENGTHS, width=12, seed=0):
    random = np.random.RandomState(seed)
    ids = np.full((len(lengths), width), PAD, np.int32)
    for row, length in zip(ids, lengths, strict=True):
        row[:length] = [CLS, *random.randint(4, 59, length - 2), SEP]
    return ids


IDS = rows()
KEYS = abnet_losses.example_keys(jax.random.key(0), np.asarray([7, 1, 9, 4]))
corrupt = jax.jit(abnet_losses.conditional_masked, static_argnums=(2, 3))
corrupt_span = jax.jit(masking.corrupt_span, static_argnames=("special", "policy"))
translation_loss = jax.jit(abnet_losses.translation_loss)


def masked(keys, ids):
    return corrupt(jax.random.clone(keys), ids, CONTROLS, 40)


@functools.cache
def draws(count=2000, length=12):
    """Many corruptions of one row of `length` tokens."""
    keys = jax.random.split(jax.random.key(1), count)
    ids = np.tile(rows((length,)), (count, 1))
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
    targets = masked(KEYS, IDS)
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


def test_choices_without_a_slot_are_counted():
    want = masked(KEYS, IDS)
    few = corrupt(jax.random.clone(KEYS), IDS, CONTROLS, 3)
    np.testing.assert_array_equal(few.input_ids, want.input_ids)
    np.testing.assert_array_equal(few.positions, np.asarray(want.positions)[:3])
    assert few.dropped_targets == np.sum(np.asarray(want.positions) < IDS.size) - 3


@pytest.mark.parametrize("side", ["target", "source"])
def test_an_example_is_corrupted_alike_in_every_batch_and_padding(side):
    def seen(keys, ids):
        if side == "source":
            return corrupt_span(jax.random.clone(keys), ids, special=CONTROLS)
        return masked(keys, ids).input_ids

    whole = seen(KEYS, IDS)
    assert (np.asarray(whole) != IDS).any()
    wider = np.pad(IDS, ((0, 0), (0, 4)), constant_values=PAD)
    again = abnet_losses.example_keys(jax.random.key(0), np.asarray([4, 7]))
    np.testing.assert_array_equal(
        seen(again, wider[[3, 0]])[:, :12], np.asarray(whole)[[3, 0]]
    )


def test_a_source_span_has_the_rates_length_and_often_an_end_of_the_sentence():
    count = 2000
    ids = np.tile(rows((12,)), (count, 1))  # 10 pieces: a span of 1 + 1
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
    autoregressive = jax.jit(abnet_losses.autoregressive, static_argnums=(1, 2))
    targets = autoregressive(IDS, CONTROLS, 40)
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


def test_lengths_count_control_pieces_and_add_up_to_what_the_target_divides_by():
    """So that S divides its length loss by T's number without being told it."""
    lengths = abnet_losses.lengths(IDS, CONTROLS)
    np.testing.assert_array_equal(lengths, LENGTHS)
    logits = np.random.RandomState(0).randn(4, 14).astype(np.float32)
    logits[:, 0] = -np.inf
    (total, weight), grads = jax.jit(
        jax.value_and_grad(abnet_losses.length_loss, has_aux=True)
    )(logits, lengths)
    assert weight == masked(KEYS, IDS).tokens
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    want = -np.log(p[np.arange(4), np.asarray(LENGTHS)]).sum()
    np.testing.assert_allclose(total, 0.1 * want, rtol=1e-5)
    assert np.isfinite(grads).all()


def test_empty_slots_cost_nothing():
    targets = masked(KEYS, IDS)
    logits = np.random.RandomState(0).randn(40, 60).astype(np.float32)
    want, weight = translation_loss(logits, targets)
    assert weight == sum(LENGTHS)
    filled = np.asarray(targets.positions) < IDS.size
    noisy = np.where(filled[:, None], logits, 50.0)
    got, _ = translation_loss(noisy, targets)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    own, _ = jax.jit(losses.label_smoothed_cross_entropy)(
        logits[filled], np.asarray(targets.labels)[filled], np.ones(filled.sum())
    )
    np.testing.assert_allclose(got, own, rtol=1e-6)


def test_micro_batches_add_up_to_the_batch():
    """Loss and gradient, with dropout: both belong to the example."""
    plm = transformer.Config(
        vocab_size=60,
        layers=1,
        width=8,
        heads=2,
        feed_forward=8,
        max_length=12,
        dropout=0.1,
    )
    config = abnet.Config(plm, plm, "cmlm", 4, 4, heads=2, max_target_length=12)
    init = jax.jit(abnet_params.init_target, static_argnums=0)
    trained, frozen = partition.split(
        init(config, jax.random.key(0)), abnet_params.is_trained
    )
    hidden = np.random.RandomState(0).randn(4, 5, 8).astype(np.float32)

    @functools.partial(jax.jit, static_argnums=3)
    def loss_and_gradient(keys, ids, hidden, slots):
        targets = abnet_losses.conditional_masked(keys, ids, CONTROLS, slots)

        def loss(trained):
            logits = abnet.decode(
                config,
                partition.merge(trained, frozen),
                targets.input_ids,
                targets.attention_mask,
                hidden,
                jnp.ones(hidden.shape[:2], bool),
                targets.positions,
                keys,
            )
            return abnet_losses.translation_loss(logits, targets)

        (total, weight), pull = jax.vjp(loss, trained)
        return total, weight, pull((jnp.ones(()), jnp.zeros(())))

    whole = loss_and_gradient(jax.random.clone(KEYS), IDS, hidden, 48)
    halves = [
        loss_and_gradient(jax.random.clone(KEYS)[half], IDS[half], hidden[half], 24)
        for half in (slice(0, 2), slice(2, 4))
    ]
    added = jax.tree.map(np.add, *halves)
    jax.tree.map(
        lambda got, want: np.testing.assert_allclose(got, want, atol=1e-5), added, whole
    )
