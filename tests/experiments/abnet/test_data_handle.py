"""ABNet whose source side is served by another lab: the same parameters, and an end."""

import jax
import numpy as np
import pytest
import served_corpus
import tiny_translations
import two_labs

from nebula_jax.data import tokenizers
from nebula_jax.runtime.life import process

HELD_OUT = 4
STEPS, BATCH = 6, tiny_translations.TINY["batch_size"]
MORE = {
    "steps": STEPS,
    "checkpoint_every": 100,
    "eval_every": 100,
    "held_out_pairs": HELD_OUT,
    "source_model": "models/shallow_spanish",
    "target_model": "models/shallow_english",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return tiny_translations.Translations(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def labs(tmp_path_factory):
    with two_labs.two_labs(tmp_path_factory.mktemp("labs")) as made:
        yield made


@pytest.fixture(scope="module")
def sides(runs):
    """A run on both folders, and these."""
    status, output = runs.run(workdir="plain", **MORE)
    assert status == 0, output
    prepared = runs.folder / "prepared"
    return {name: next(prepared.rglob(name)) for name in ("source", "target")}


@pytest.fixture(scope="module")
def owner(labs, runs, sides):
    path = runs.folder / MORE["source_model"]
    tokenizer = tokenizers.load(path)
    made = served_corpus.Owner(labs.s, sides["source"], tokenizer, path, kind="side")
    with made.serving():
        yield made


@pytest.mark.slow  # M3's is in every run of the tests
def test_a_run_on_a_side_that_is_served_ends_as_one_on_its_folder(
    owner, labs, runs, sides
):
    """First a grant that is soon spent: both save one step, and go on from there."""
    plain, handle = "plain", "handle"
    held_out = 2 * tiny_translations.TINY["bleu_sentences"] + HELD_OUT
    operations = ("schema", "lengths", "rows")

    def train():
        started = [
            runs.start(
                cluster="target",
                federation=labs.s.folder.path,
                side_dir=sides["target"],
                workdir=handle,
                **MORE,
            ),
            runs.start(
                cluster="source",
                federation=labs.t.folder.path,
                data=f"handle:{served_corpus.HANDLE}",
                workdir=handle,
                **MORE,
            ),
        ]
        ends = [runs._end_of(each, 120) for each in started]
        print(*(output for _, output in ends))
        return ends

    given = owner.grant("owner@lab-t", operations, rows=held_out + 4 * BATCH)
    for status, output in train():
        assert status == process.STOPPED_BY_PEER, output
    assert f"grant {given.number} of owner@lab-t" in output
    assert "source: stopped after step" in output
    folders = [runs.folder / handle / name for name in sides]
    saved = [sorted((each / "checkpoints").iterdir())[0].name for each in folders]
    assert saved[0] == saved[1]
    assert 2 <= int(saved[0]) <= 4

    rest = held_out + (STEPS - int(saved[0])) * BATCH
    given = owner.grant("owner@lab-t", operations, rows=rest)
    for status, output in train():
        assert status == 0, output
    assert owner.used(given)[0] == rest
    for cluster in sides:
        jax.tree.map(
            np.testing.assert_array_equal,
            runs.state(handle, cluster, STEPS),
            runs.state(plain, cluster, STEPS),
        )
    scores = f"target/translations/held_out-{STEPS:08d}.scores.tsv"
    files = [runs.folder / workdir / scores for workdir in (handle, plain)]
    assert files[0].read_bytes() == files[1].read_bytes()
