"""BERT over a federation, with text that another lab serves: the same parameters."""

import pytest
import served_corpus

from nebula_jax.data.tokenizers import vocabulary as vocabularies

STEPS, BATCH, HELD_OUT = 18, 4, 2 * 4  # rows of a step, and those of two languages
HANDLE = f"handle:{served_corpus.HANDLE}"
MORE = {"steps": STEPS, "checkpoint_every": 100, "workdir": "handle"}


@pytest.fixture(scope="module")
def vocabulary(runs):
    """The vocabulary of a run in one process on the folder."""
    runs.finished(cluster="whole", **MORE | {"workdir": "plain"})
    return runs.flag("plain", "vocabulary")


@pytest.fixture(scope="module")
def owner(labs, runs, vocabulary):
    pieces = vocabularies.load(runs.folder / vocabulary)
    made = served_corpus.Owner(labs.s, runs.text, pieces, pieces.path)
    with made.serving():
        yield made


@pytest.mark.slow
def test_clusters_of_two_labs_end_as_one_process_on_the_folder(
    owner, labs, runs, vocabulary
):
    """First a grant that is soon spent: both save one step, and go on from there."""
    served = {"data_dir": "nowhere", "data": HANDLE}

    def start():
        for number, (lab, more) in enumerate(((labs.s, {}), (labs.t, served))):
            given = MORE | more | {"cluster": number, "vocabulary": vocabulary}
            yield runs.start(federation=lab.folder.path, **given)

    rows = HELD_OUT + 14 * BATCH, HELD_OUT, BATCH
    clusters = ("cluster-0", "cluster-1")
    step, *_ = served_corpus.trained_by_two_grants(
        runs, owner, lambda: list(start()), clusters, rows, STEPS
    )
    assert 0 < step <= 14
