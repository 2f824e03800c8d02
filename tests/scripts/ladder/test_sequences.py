import numpy as np
import pytest

from nebula_jax import errors
from nebula_jax.data import joined_rows
from nebula_jax.models import transformer
from nebula_jax.training import bert
from scripts.ladder import sequences

L = 32
PAD, SEP = sequences.PAD, sequences.SEP


def packed(rows=64, first=20):
    """Rows of text that are nearly full, each token with a number of its own."""
    ids = np.arange(first, first + rows * L, dtype=np.int32).reshape(rows, L)
    ids[:, 0], ids[:, -4], ids[:, -3:] = 7, SEP, PAD
    return ids


def test_a_sequence_is_cut_off_and_ends_as_a_sequence_does():
    ids = packed()
    found = sequences.cut(ids, np.random.default_rng(0))
    lengths = joined_rows.lengths(found, PAD)
    assert found.dtype == np.int32
    assert min(lengths) == L / 8
    assert max(lengths) == L - 3  # what text there was
    for row, length, whole in zip(found, lengths, ids, strict=True):
        np.testing.assert_array_equal(row[: length - 1], whole[: length - 1])
        assert row[length - 1] == SEP
        assert not np.any(row[length:] != PAD)


def test_about_half_is_padding():
    found = sequences.cut(packed(1000), np.random.default_rng(0))
    assert sequences.padding([found]) == pytest.approx(0.45, abs=0.02)
    assert sequences.padding([packed()]) == 3 / L


@pytest.mark.parametrize("groups", [1, 2])
def test_no_sequence_is_left_out_and_one_row_less_would_leave_some(groups):
    random = np.random.default_rng(0)
    batches = [sequences.cut(packed(16), random) for _ in range(3)]
    share = sequences.joined_share(batches, groups, groups)
    settings = bert.Config(
        transformer.config_of_size("nano", vocab_size=9, max_length=L),
        *(1, 0.15, "bert", 1, "masked", "joined", share),
    )
    rows = settings.rows(16, groups)
    assert rows == settings.rows(16, 1) < 16  # as many on one device

    def left_out(rows):
        plans = [
            joined_rows.plan(joined_rows.lengths(each, PAD), L, rows, number)
            for each in batches
            for number in {1, groups}
        ]
        return sum(plan.left_out for plan in plans)

    assert left_out(rows) == 0 < left_out(rows - groups)


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(errors.SettingsError, match=r"16 .* 32 parts: 2 devices with"):
        sequences.joined_share([packed(16)], 2, 32)
