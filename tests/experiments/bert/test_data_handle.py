"""BERT over a federation, with text that another lab serves: the same parameters."""

import jax
import numpy as np
import pytest
import served_corpus

from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.runtime.life import process

STEPS, BATCH, HELD_OUT = 18, 4, 2 * 4  # rows of a step, and those of two languages
HANDLE = f"handle:{served_corpus.HANDLE}"
MORE = {"steps": STEPS, "checkpoint_every": 100, "workdir": "handle"}


@pytest.fixture(scope="module")
def vocabulary(runs):
    """A run in one process on the folder, and the flag of its vocabulary."""
    status, output = runs.run(cluster="whole", **MORE | {"workdir": "plain"})
    assert status == 0, output
    given = (runs.folder / "plain" / "run.flags").read_text().splitlines()
    return next(each for each in given if each.startswith("--vocabulary="))


@pytest.fixture(scope="module")
def owner(labs, runs, vocabulary):
    path = runs.folder / vocabulary.removeprefix("--vocabulary=")
    pieces = vocabularies.load(path)
    made = served_corpus.Owner(labs.s, runs.text, pieces, path)
    with made.serving():
        yield made


@pytest.mark.slow  # M3's is in every run of the tests
def test_clusters_of_two_labs_end_as_one_process_on_the_folder(
    owner, labs, runs, vocabulary
):
    """First a grant that is soon spent: both save one step, and go on from there."""

    def train():
        started = [
            runs.start(
                vocabulary,
                "--cluster=0",
                f"--federation={labs.s.folder.path}",
                **MORE,
            ),
            runs.start(
                vocabulary,
                "--cluster=1",
                f"--federation={labs.t.folder.path}",
                **MORE | {"data_dir": "nowhere", "data": HANDLE},
            ),
        ]
        ends = [runs._end_of(each, 120) for each in started]
        print(*(output for _, output in ends))
        return ends

    given = owner.grant("owner@lab-t", rows=HELD_OUT + 14 * BATCH)
    for status, output in train():
        assert status == process.STOPPED_BY_PEER, output
    assert f"grant {given.number} of owner@lab-t for {served_corpus.HANDLE}" in output
    folders = [runs.folder / "handle" / f"cluster-{k}" / "checkpoints" for k in (0, 1)]
    saved = [[path.name for path in each.iterdir()] for each in folders]
    assert saved[0] == saved[1]
    assert len(saved[0]) == 1
    step = int(saved[0][0])
    assert 0 < step <= 14

    rest = HELD_OUT + (STEPS - step) * BATCH
    given = owner.grant("owner@lab-t", rows=rest)
    for status, output in train():
        assert status == 0, output
        assert f"going on after step {step}" in output
    assert owner.used(given)[0] == rest  # and not a row more
    for cluster in ("cluster-0", "cluster-1"):
        jax.tree.map(
            np.testing.assert_array_equal,
            runs.state("handle", cluster, STEPS),
            runs.state("plain", cluster, STEPS),
        )
