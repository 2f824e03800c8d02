"""The replica of a cluster: what others must have alike, and what cannot be."""

import configured
import pytest

from experiments.bert import config, models, replica
from experiments.pretraining import vocabulary as vocabularies
from nebula_jax.communication import bridge
from nebula_jax.data.tokenizers import vocabulary as vocabulary_lib

LINES = ["the house has 3 doors", "a school of 12 rooms", "the old station"] * 20


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    path = tmp_path_factory.mktemp("words") / "v.model"
    vocabulary_lib.train(iter(LINES), 40, path)
    return path


def plan(vocabulary, **flags):
    given = {
        "vocabulary": vocabulary,
        "languages": "en",
        "model_size": "nano",
        "max_length": 16,
        "batch_size": 4,
        "devices_per_cluster": 1,
        **flags,
    }
    run = configured.run(config, **given)
    words = vocabularies.given(run.local)
    return run, words, replica.plan(run, models.load(run, words), 0)


def test_clusters_with_other_layouts_part_in_words_that_name_it(vocabulary):
    """Layers that only one cluster's checkpoint has, such as of another hot start."""
    one, two = (plan(vocabulary, layers=layers)[2].layout() for layers in (1, 2))
    hellos = [
        bridge.frames.Hello(f"cluster:{k}", "0.1", each)
        for k, each in enumerate((one, two))
    ]
    with pytest.raises(
        bridge.Mismatch, match=r"cluster:1 has layout=\w+, cluster:0 has"
    ):
        bridge.check_agreement(*hellos)
    bridge.check_agreement(hellos[0], hellos[0])


def test_one_cluster_has_no_rounds(vocabulary):
    _, _, own = plan(vocabulary, clusters=1, sync="allreduce")
    assert own.member is None
    assert own.layout() == {}
