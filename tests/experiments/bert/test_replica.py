"""The replica of a cluster: what others must have alike, and what cannot be."""

import configured
import pytest

from experiments.bert import config, models, replica
from experiments.pretraining import vocabulary as vocabularies
from nebula_jax.data.tokenizers import vocabulary as vocabulary_lib
from nebula_jax.parallel.local_steps import member

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


def test_clusters_with_other_layouts_have_other_fingerprints(vocabulary):
    """Layers that only one cluster's checkpoint has, such as of another hot start."""
    found = []
    for layers in (1, 2):
        run, _, own = plan(vocabulary, layers=layers)
        part = member.Member(run.agreed.rounds(), ["a", "b"], "a", own.specs)
        found.append(part.fingerprint)
        state = own.in_rounds(part).fresh.init()
        assert sorted(state) == ["codecs", "outers", "state"]
    assert found[0] != found[1]  # which `local_steps.begin` compares
