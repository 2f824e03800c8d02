"""Small functions of the ABNet experiment, in this process."""

import operator

import jax
import numpy as np
import pytest
import tiny_translations

from experiments.abnet import channels, data
from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication import codecs, selector
from nebula_jax.data import ragged_rows


def configured(**values):
    """A run with two buckets and a small batch."""
    given = {"length_buckets": "8,16", "batch_size": 4, "micro_batches": 2}
    return tiny_translations.run(**given | values)


def rows(lengths, seed=0):
    """Token rows of these lengths."""
    tokens = np.random.RandomState(seed).randint(5, 50, sum(lengths)).astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    nothing = np.zeros(0, np.int32)
    ids = [f"train-{n}" for n in range(len(lengths))]
    return ragged_rows.TokenRows(ids, tokens, offsets, nothing, nothing)


@pytest.mark.parametrize(("longest", "expected"), [(0, 8), (8, 8), (9, 16), (16, 16)])
def test_a_row_has_the_capacity_of_the_smallest_bucket(longest, expected):
    assert (
        data.bucket_length(configured().agreed, np.asarray([3, longest, 2])) == expected
    )


def test_there_is_room_for_every_question_of_ar():
    random = np.random.RandomState(0)
    for _ in range(50):
        lengths = random.randint(2, 17, 8)
        room = len(data.slots(lengths, 8, 16, "ar"))
        assert lengths.sum() - 8 <= room <= 8 * 16
        assert room % 32 == 0


@pytest.mark.parametrize("count", [1, 2, 8, 64])
def test_there_is_room_for_the_masks_of_cmlm(count):
    """Few rows can all be masked wholly; of many, four standard deviations more."""
    random = np.random.RandomState(0)
    for _ in range(20):
        lengths = random.randint(2, 17, count)
        room = len(data.slots(lengths, count, 16, "cmlm"))
        pieces = np.maximum(lengths - 2, 1)
        drawn = np.ceil(random.rand(1000, count) * pieces).sum(axis=1)
        assert (drawn > room).mean() < 0.005
        assert room <= count * 16


def test_shapes_are_few():
    random = np.random.RandomState(0)
    shapes = {
        len(data.slots(random.randint(2, 17, 8), 8, 16, objective))
        for _ in range(200)
        for objective in ("ar", "cmlm")
    }
    assert len(shapes) <= 4


def test_evaluation_batches_are_of_what_was_chosen_alike_ones_together():
    text = rows([4, 12, 5, 16, 3, 9])
    five, nine = (configured(bleu_sentences=most).agreed for most in (5, 9))
    chosen = data.evaluation_indices(five, "test", len(text))
    assert chosen.tolist() == [0, 1, 2, 3, 4]
    assert data.evaluation_indices(nine, "test", 6).tolist() == [0, 1, 2, 3, 4, 5]
    batches = data.evaluation_batches(
        configured(batch_size=3, micro_batches=1).agreed, text, chosen
    )
    assert [each.indices.tolist() for each in batches] == [[4, 0, 2], [1, 3, 3]]
    assert [each.count for each in batches] == [3, 2]
    assert [each.bucket for each in batches] == [0, 1]


def test_a_digest_is_of_ids_tokens_and_where_sentences_end():
    run = configured()

    def digest(lengths, seed=0):
        train = rows(lengths, seed)
        return data.digest(run, data.Text(None, {}, {"train": train}, {}))

    same = digest([3, 4])
    assert digest([3, 4]) == same
    assert len({same, digest([4, 3]), digest([3, 4], seed=1), digest([3, 3])}) == 4


@pytest.mark.parametrize(
    ("codec", "expected"),
    [
        ("identity", "identity"),
        ("fp16", "fp16"),
        ("pack_tokens|fp16", "pack_tokens|fp16"),
        ("error_feedback(fp16)", "pack_tokens|fp16"),
        ("from_step(3,fp16)", "from_step(3,fp16)"),
        ("from_step(3,error_feedback(fp16))", "pack_tokens|fp16"),
    ],
)
def test_sentences_to_translate_are_sent_as_the_model_was_trained(codec, expected):
    """Save by a codec that remembers what was sent."""
    agreed = configured(forward_codec=codec).agreed
    spec = channels.evaluation_spec(agreed, 16)
    used = channels.evaluation_codec(agreed, spec)
    want = codecs.from_string(expected)
    assert used.zstd == want.zstd
    pair = (selector.as_selector(each).codecs for each in (used, want))
    for ours, theirs in zip(*pair, strict=True):
        payloads = (codec_lib.payload_spec(each, spec) for each in (ours, theirs))
        assert operator.eq(*map(jax.tree.leaves, payloads))


def test_dev_is_translated_every_so_often_and_at_the_end():
    agreed = configured(eval_every=4, steps=10).agreed
    assert [step for step in range(1, 11) if agreed.is_evaluated(step)] == [4, 8, 10]
