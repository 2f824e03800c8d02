"""The rows of each cluster: together they are those of one cluster, or each its own."""

import itertools

import configured
import numpy as np
import pytest
import tiny_runs

from experiments.bert import config, data
from experiments.m3 import config as m3_config
from experiments.m3 import data as m3_data
from experiments.pretraining import text
from nebula_jax import errors
from nebula_jax.data import language_mixture
from nebula_jax.data.tokenizers import vocabulary as vocabularies

LENGTH = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    tiny_runs.write_text(folder / "text")
    return folder


@pytest.fixture(scope="module")
def vocabulary(folder):
    languages = ["de", "en", "sw"]
    lines = language_mixture.vocabulary_lines(folder / "text", languages, 0.3, 1000)
    vocabularies.train(lines, 120, folder / "v.model")
    return vocabularies.load(folder / "v.model")


@pytest.fixture
def run(folder):

    def made(**given):
        common = {"data_dir": folder / "text", "prepared_dir": folder / "prepared"}
        common |= {"max_length": LENGTH, "eval_batches": 2, "eval_batch_size": 4}
        return data.checked(configured.run(config, **common | given))

    return made


def batches(run, index, vocabulary, count, position=None, here=slice(None)):
    """The next batches of a cluster, and where it is then."""
    share = data.share_of(run.agreed, index)
    with data.text_of(run, index, vocabulary) as opened:
        opened.begin(position, share.batch_size, share.within(here))
        found = list(itertools.islice(opened.batches, count))
        return found, opened.position()


def test_clusters_together_see_what_one_sees_with_the_whole_batch(run, vocabulary):
    """Bit for bit, however the text is mixed."""
    mixed = {"task_mix": "mrtd=1 trtd=2"}
    alone = run(clusters=1, sync="allreduce", batch_size=12, **mixed)
    parts = run(clusters=3, batch_size=4, **mixed)
    whole, _ = batches(alone, 0, vocabulary, 7)
    found = [batches(parts, index, vocabulary, 7)[0] for index in range(3)]
    assert [each[0].shape for each in found] == [(4, LENGTH)] * 3
    for number, batch in enumerate(whole):
        np.testing.assert_array_equal(
            np.concatenate([each[number] for each in found]), batch
        )
    assert len({batch.tobytes() for batch in whole}) == 7
    shares = [data.share_of(parts.agreed, index) for index in range(3)]
    assert [share.first_row for share in shares] == [0, 4, 8]
    # With text of its own a cluster also draws masks of its own.
    own = run(clusters=3, batch_size=4, languages="en|de|sw")
    for made in (parts, own):
        shares = [data.share_of(made.agreed, index) for index in range(3)]
        assert [share.number for share in shares] == [0, 4, 8]


def test_processes_of_a_cluster_share_its_rows_alone(run, vocabulary):
    made = run(batch_size=6)
    both, _ = batches(made, 1, vocabulary, 3)
    first, _ = batches(made, 1, vocabulary, 3, here=slice(0, 3))
    second, _ = batches(made, 1, vocabulary, 3, here=slice(3, 6))
    for batch, *halves in zip(both, first, second, strict=True):
        np.testing.assert_array_equal(np.concatenate(halves), batch)


def test_a_cluster_with_languages_of_its_own_has_a_generators_stream(run, vocabulary):
    """The stream of M3's generator of that number, seed, languages and tasks."""
    given = {"task_mix": "mrtd|mrtd=1 trtd=1", "seed": 5, "batch_size": 6}
    made = run(languages="en|de sw", **given)
    assert data.share_of(made.agreed, 1) == data.Share(6, 0, 6, 6)
    found, _ = batches(made, 1, vocabulary, 4)
    of_m3 = configured.run(
        m3_config, generators="en|de sw", task_mix=given["task_mix"], seed=5,
        max_length=LENGTH, data_dir=made.local.data_dir,
        prepared_dir=made.local.prepared_dir,
    )  # fmt: skip
    wanted = m3_data.text_of(m3_data.checked(of_m3), 1, vocabulary)
    wanted.begin(None, 6)
    np.testing.assert_array_equal(found, list(itertools.islice(wanted.batches, 4)))


def test_held_out_text_is_the_same_for_any_clusters(run, vocabulary):
    alone = run(clusters=1, sync="allreduce", batch_size=10)
    parts = run(clusters=2, batch_size=5)
    wanted = list(data.text_of(alone, 0, vocabulary).held_out())
    languages = [language for language, _ in wanted]
    assert languages == ["de", "de", "en", "en", "sw", "sw"]
    for index in range(2):
        found = data.text_of(parts, index, vocabulary).held_out()
        for (name, batch), (other, same) in zip(found, wanted, strict=True):
            assert (name, batch.shape) == (other, (4, LENGTH))
            np.testing.assert_array_equal(batch, same)


def test_one_stream_is_compared_and_streams_of_their_own_are_not(run, vocabulary):
    one, other = run(), run(mono_alpha=0.9)
    found = [
        data.same_text(each, data.text_of(each, index, vocabulary))
        for each, index in ((one, 0), (one, 1), (other, 0))
    ]
    assert found[0] == found[1] != found[2]
    assert set(found[0]) == {"text"}
    made = run(languages="en|de")
    assert data.same_text(made, data.text_of(made, 0, vocabulary)) == {}


def test_languages_are_written_out(run, folder):
    assert run().agreed.languages == ("de en sw",)  # those of the folder
    assert run(languages="en,de").agreed == run(languages="en de").agreed
    (folder / "text" / "mono" / "fr.valid.txt").write_text("un\n")  # none to train on
    assert run().agreed.groups() == [["de", "en", "sw"]]
    assert run(languages="sw|en de").agreed.groups() == [["sw"], ["en", "de"]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"languages": "en ur"}, "language 'ur' has no text"),
        ({"task_mix": "mrtd|trtd"}, "has 2 mixes for 1 clusters"),
        ({"languages": "en|de", "task_mix": "trtd"}, "cluster:0 has no language to"),
        ({"task_mix": "trtd=0"}, "a cluster without a task"),
        ({"data_dir": "nowhere"}, "there is no such folder"),
    ],
)
def test_text_that_is_not_there(run, given, message):
    with pytest.raises(errors.NebulaError, match=message):
        run(**given)


def test_a_cluster_with_a_text_of_its_own_needs_no_other(run, folder):
    made = configured.run(
        config, languages="en|ur", data_dir=folder / "text", cluster="0"
    )
    assert data.checked(made, only=0).agreed.groups() == [["en"], ["ur"]]
    with pytest.raises(errors.NebulaError, match="'ur' has no text"):
        data.checked(made, only=1)


def test_served_text_is_not_looked_for_here():
    given = {"data": "handle:corpus", "federation": "f", "data_dir": "nowhere"}
    made = data.checked(configured.run(config, **given, languages="en de"))
    assert made.agreed.groups() == [["en", "de"]]


def test_served_text_is_read_so_far_ahead_that_all_can_agree_on_the_end(
    run, vocabulary, monkeypatch
):
    """And no further than to the end."""
    monkeypatch.setattr(text, "Text", lambda *parts: parts[2])
    reader = data.text_of(run(steps=50, inner_steps=20, delay=3), 1, vocabulary)
    assert (reader.cluster, reader.rows) == ("cluster:1", 16)
    assert (reader.ahead, reader.most) == (25, 50)
    alone = run(clusters=1, sync="allreduce", steps=50)
    reader = data.text_of(alone, 0, vocabulary)
    assert (reader.ahead, reader.most) == (2, 50)
