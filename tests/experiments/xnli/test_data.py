import numpy as np
import pytest
import tiny_nli

from experiments.xnli import data, models


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Invented pairs, and a model."""
    found = tmp_path_factory.mktemp("xnli")
    tiny_nli.write_text(found / "text")
    tiny_nli.write_model(found / "models" / "bert")
    return found


def read(folder, wanted, **values):
    run = tiny_nli.run_in(folder, **values)
    return data.read(run, wanted, *models.load(run))


def test_a_subset_of_the_training_pairs_is_drawn_by_seed(folder):
    drawn = []
    for seed in (0, 0, 1):
        text = read(folder, {"train": ["en"]}, max_train_pairs=20, seed=seed)
        drawn.append(text.parts["train"]["en"].rows.ids)
    assert len(drawn[0]) == 20
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_subset_of_the_test_pairs_is_that_of_every_seed_and_language(folder):
    drawn = []
    for seed in (0, 1):
        text = read(folder, {"test": ["en", "de"]}, max_test_pairs=5, seed=seed)
        drawn += [part.rows.ids for part in text.parts["test"].values()]
    assert [len(ids) for ids in drawn] == [5] * 4
    assert drawn == drawn[:1] * 4
    wanted = {"test": ["en"], "dev": ["en"]}
    all_of_them, few = (
        {
            split: len(part["en"].labels)
            for split, part in read(folder, wanted, max_test_pairs=most).parts.items()
        }
        for most in (10**6, 5)
    )
    assert few == all_of_them | {"test": 5}
    assert all_of_them["test"] > 5


def test_rows_are_padded_to_their_bucket(folder):
    text = read(folder, {"dev": ["en"]})
    part = text.parts["dev"]["en"]
    buckets = text.buckets(part)
    for bucket in np.unique(buckets):
        indices = np.flatnonzero(buckets == bucket)
        batch = data.length_buckets.Batch(bucket, indices, len(indices))
        rows = text.input_ids(part, batch)
        assert rows.shape[1] == text.length_buckets[bucket]
        tokens = (rows != text.tokenizer.special.pad).sum(axis=1)
        np.testing.assert_array_equal(tokens, part.rows.lengths[batch.indices])
