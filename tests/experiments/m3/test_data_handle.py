"""M3 on text that another lab serves: the same parameters, and an end with a grant."""

import configured
import pytest
import served_corpus
import tiny_runs

from experiments.m3 import config, data
from nebula_jax import errors
from nebula_jax.data.tokenizers import vocabulary as vocabularies

STEPS, BATCH = 12, tiny_runs.TINY["batch_size"]
HANDLE = f"handle:{served_corpus.HANDLE}"
CLUSTERS = ("discriminator", "generator-0")


class Runs(tiny_runs.Runs):
    def flags(self):
        more = {"generators": "en de", "task_mix": "mrtd=1 trtd=1", "steps": STEPS}
        more |= {"checkpoint_every": 100, "eval_every": 5, "window": 2}
        return super().flags() | more


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def vocabulary(runs):
    """The vocabulary of a run on the folder."""
    runs.finished(cluster="whole", workdir="plain")
    return runs.flag("plain", "vocabulary")


@pytest.fixture(scope="module")
def owner(labs, runs, vocabulary):
    pieces = vocabularies.load(runs.folder / vocabulary)
    made = served_corpus.Owner(labs.s, runs.text, pieces, pieces.path)
    with made.serving():
        yield made


@pytest.mark.slow  # of batches: tests/runtime/served; over switches: test_federation.py
def test_a_spent_grant_ends_a_run_with_checkpoints_and_another_one_ends_it_well(
    owner, labs, runs, vocabulary
):
    """All clusters save one step; with a new grant the end is that of the folder."""
    common = {"workdir": "handle", "data_dir": "nowhere", "vocabulary": vocabulary}

    def start():
        for lab, of_cluster in (
            (labs.s, {"cluster": "discriminator"}),
            (labs.t, {"cluster": "generator:0", "data": HANDLE}),
        ):
            yield runs.start(**common, **of_cluster, federation=lab.folder.path)

    held_out = 2 * BATCH
    rows = 7 * BATCH + held_out, held_out, BATCH
    step, spent, said = served_corpus.trained_by_two_grants(
        runs, owner, lambda: list(start()), CLUSTERS, rows, STEPS
    )
    assert "generator:0: stopped after step" in said
    assert 3 <= step <= 7  # 7 batches came, of which 3 are kept for the others' pace
    assert spent == rows[0]


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
