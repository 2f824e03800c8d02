import jax
import numpy as np
import pytest

from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.models import mask_slots
from nebula_jax.training import masking

V = 1000


def text(rows=600, length=128, seed=0):
    random = np.random.RandomState(seed)
    ids = random.randint(vocabularies.NUM_SPECIAL, V, (rows, length)).astype(np.int32)
    ids[:, 0] = vocabularies.SPECIAL.cls
    for row in range(rows):
        end = random.randint(length // 2, length)
        ids[row, end - 1] = vocabularies.SPECIAL.sep
        ids[row, end:] = vocabularies.SPECIAL.pad
    return ids


mask_tokens = jax.jit(masking.mask_tokens, static_argnames=("rate", "vocab_size"))


def mask(ids, rate=0.15, policy="electra", seed=0):
    policy = masking.POLICIES[policy]
    key = jax.random.key(seed)
    masked = mask_tokens(key, ids, rate=rate, policy=policy, vocab_size=V)
    return jax.tree.map(np.asarray, masked)


@pytest.mark.parametrize(
    ("length", "rate", "slots"),
    [(128, 0.15, 19), (512, 0.15, 79), (512, 0.25, 130), (8, 0.01, 1)],
)
def test_capacity_is_electras(length, rate, slots):
    assert masking.capacity(rate, length) == slots


def test_as_much_text_is_masked_as_the_rate_says_and_nothing_else_changes():
    """Positions are distinct and ascend; the originals are what stood there."""
    ids = text()
    masked = mask(ids)
    wanted = np.round(0.15 * np.sum(ids != vocabularies.SPECIAL.pad, axis=-1))
    np.testing.assert_array_equal(np.sum(masked.positions < 128, axis=-1), wanted)
    for row, positions in enumerate(masked.positions):
        chosen = positions[positions < 128]
        assert (np.diff(chosen) > 0).all()
        assert (ids[row, chosen] >= vocabularies.NUM_SPECIAL).all()
        originals = masked.originals[row]
        np.testing.assert_array_equal(originals[: len(chosen)], ids[row, chosen])
        assert (originals[len(chosen) :] == 0).all()
    marks = np.asarray(mask_slots.mark(masked.positions, 128))
    np.testing.assert_array_equal(masked.input_ids[~marks], ids[~marks])


@pytest.mark.parametrize(
    ("policy", "mask_share", "kept_share"),
    [("mask", 1.0, 0.0), ("electra", 0.85, 0.15), ("bert", 0.8, 0.1)],
)
def test_policies_write_what_they_say(policy, mask_share, kept_share):
    ids = text()
    masked = mask(ids, policy=policy)
    marks = np.asarray(mask_slots.mark(masked.positions, 128))
    written, before = masked.input_ids[marks], ids[marks]
    # 600 rows give 8,600 draws: a share varies by 0.004 (one sigma).
    assert np.mean(written == vocabularies.SPECIAL.mask) == pytest.approx(
        mask_share, abs=0.02
    )
    assert np.mean(written == before) == pytest.approx(kept_share, abs=0.02)
    random = (written != vocabularies.SPECIAL.mask) & (written != before)
    assert np.mean(random) == pytest.approx(1 - mask_share - kept_share, abs=0.02)


def test_both_sides_of_a_pair_are_masked_alike():
    ids = text()
    ids[:, 1:] = np.where(ids[:, 1:] == vocabularies.SPECIAL.pad, 7, ids[:, 1:])
    ids[:, 60:62] = vocabularies.SPECIAL.sep
    marks = np.asarray(mask_slots.mark(mask(ids).positions, 128))
    left, right = marks[:, 1:60].mean(), marks[:, 62:].mean()
    assert left == pytest.approx(right, abs=0.01)


def test_a_row_without_text_stays_as_it_is():
    ids = np.zeros((2, 16), np.int32)
    ids[1, :2] = [vocabularies.SPECIAL.cls, vocabularies.SPECIAL.sep]
    masked = mask(ids)
    np.testing.assert_array_equal(masked.input_ids, ids)
    assert (masked.positions == 16).all()


def test_a_row_is_masked_alike_in_whatever_batch_it_stands():
    ids = text(rows=8)
    named = {"rate": 0.15, "policy": masking.BERT, "vocab_size": V}
    jitted = jax.jit(masking.mask_rows, static_argnames=named)

    def rows(part):
        keys = jax.random.split(jax.random.key(0), 8)
        return jax.device_get(jitted(keys[part], ids[part], **named))

    whole = rows(slice(8))
    want = jax.tree.map(lambda leaf: leaf[3:], whole)
    jax.tree.map(np.testing.assert_array_equal, rows(slice(3, 8)), want)
    key = jax.random.split(jax.random.key(0), 8)[5]
    alone = jax.device_get(mask_tokens(key, ids[5:6], **named))
    want = jax.tree.map(lambda leaf: leaf[5:6], whole)
    jax.tree.map(np.testing.assert_array_equal, alone, want)
