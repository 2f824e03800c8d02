import numpy as np
import pytest

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


@pytest.mark.parametrize(("groups", "micro_batches"), [(1, 1), (2, 1), (2, 2)])
def test_no_sequence_is_left_out_and_fewer_rows_would_leave_some(groups, micro_batches):
    random = np.random.default_rng(0)
    batches = [sequences.cut(packed(64), random) for _ in range(3)]
    share = sequences.joined_share(batches, groups, micro_batches)
    settings = bert.Config(
        transformer.config_of_size("nano", vocab_size=9, max_length=L),
        *(1, 0.15, "bert", micro_batches, "masked", "joined", share),
    )
    rows = settings.rows(64, groups)

    def left_out(rows):
        lengths = [joined_rows.lengths(each, PAD) for each in batches]
        return sum(joined_rows.plan(each, L, rows, groups).left_out for each in lengths)

    assert rows % (groups * micro_batches) == 0
    assert rows < 64
    assert left_out(rows) == 0 < left_out(rows - groups * micro_batches)
