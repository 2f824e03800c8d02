"""M3 on text that another lab serves: the same parameters, and an end with a grant."""

import configured
import jax
import numpy as np
import pytest
import served_corpus
import tiny_runs

from experiments.m3 import config, data
from nebula_jax import errors
from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.runtime.life import process

STEPS, BATCH = 12, tiny_runs.TINY["batch_size"]
HANDLE = f"handle:{served_corpus.HANDLE}"
CLUSTERS = ("discriminator", "generator-0")


class Runs(tiny_runs.Runs):
    """Runs of one generator."""

    def flags(self):
        more = {"generators": "en de", "task_mix": "mrtd=1 trtd=1", "steps": STEPS}
        more |= {"checkpoint_every": 100, "eval_every": 5, "window": 2}
        return super().flags() | more


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def plain(runs):
    """A run on the folder, and its vocabulary."""
    status, output = runs.run(cluster="whole", workdir="plain")
    assert status == 0, output
    given = (runs.folder / "plain" / "run.flags").read_text().splitlines()
    return next(each for each in given if each.startswith("--vocabulary="))


@pytest.fixture(scope="module")
def owner(labs, runs, plain):
    vocabulary = vocabularies.load(runs.folder / plain.removeprefix("--vocabulary="))
    made = served_corpus.Owner(labs.s, runs.text, vocabulary, vocabulary.path)
    with made.serving():
        yield made


def test_a_spent_grant_ends_a_run_with_checkpoints_and_another_one_ends_it_well(
    owner, labs, runs, plain
):
    """All clusters save one step; with a new grant the end is that of the folder."""
    held_out = 2 * BATCH
    rows = 7 * BATCH + held_out
    given = owner.grant("owner@lab-t", rows=rows)

    def train():
        common = {"workdir": "handle", "data_dir": "nowhere"}
        started = [
            runs.start(
                plain,
                "--cluster=discriminator",
                **common,
                federation=labs.s.folder.path,
            ),
            runs.start(
                plain,
                "--cluster=generator:0",
                f"--data={HANDLE}",
                **common,
                federation=labs.t.folder.path,
            ),
        ]
        ends = [runs._end_of(each, 120) for each in started]
        print(*(output for _, output in ends))
        return ends

    (other, _), (status, output) = train()
    assert other == process.STOPPED_BY_PEER
    assert status == process.STOPPED_BY_PEER, output
    reason = f"grant {given.number} of owner@lab-t for {served_corpus.HANDLE} has"
    assert reason in output
    assert "generator:0: stopped after step" in output
    folders = [runs.folder / "handle" / name / "checkpoints" for name in CLUSTERS]
    saved = [sorted(path.name for path in each.iterdir()) for each in folders]
    assert saved[0] == saved[1]
    assert len(saved[0]) == 1
    step = int(saved[0][0])
    assert 3 <= step <= 7  # 7 batches came, of which 3 are kept for the others' pace
    assert owner.used(given)[0] == rows

    rest = held_out + (STEPS - step) * BATCH
    again = owner.grant("owner@lab-t", rows=rest)
    for status, output in train():
        assert status == 0, output
        assert f"going on after step {step}" in output
    assert owner.used(again)[0] == rest  # and not a row more
    for cluster in CLUSTERS:
        jax.tree.map(
            np.testing.assert_array_equal,
            runs.state("handle", cluster, STEPS),
            runs.state("plain", cluster, STEPS),
        )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"data": "corpus"}, "expected handle:NAME"),
        ({"data": HANDLE}, "needs --federation"),
        ({"data": HANDLE, "federation": "f", "cluster": "whole"}, "cluster=whole"),
        (
            {"data": HANDLE, "federation": "f", "processes_per_cluster": 2},
            "one process each",
        ),
        (
            {"data": HANDLE, "federation": "f", "cluster": "generator:0"}
            | {"coordinator": "127.0.0.1:1", "num_processes": 2, "process_id": 0},
            "one process each",
        ),
    ],
)
def test_what_cannot_work_is_named_before_anything_starts(given, message):
    with pytest.raises(errors.SettingsError, match=message):
        configured.run(config, **given)


def test_groups_and_vocabulary_have_to_be_given():
    given = {"data": HANDLE, "federation": "f", "generators": "en de|sw"}
    run = configured.run(config, **given)
    assert data.checked(run).agreed.groups() == [["en", "de"], ["sw"]]
    with pytest.raises(errors.SettingsError, match="needs --vocabulary"):
        data.shared_vocabulary(run)
    with pytest.raises(errors.SettingsError, match="there is no text folder"):
        data.checked(configured.run(config, **given | {"generators": "2"}))
    with pytest.raises(errors.SettingsError, match="has 2, from 0"):
        data.checked(run, only=2)
