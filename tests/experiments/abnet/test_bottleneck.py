"""A run with a bottleneck of several ranks: over clusters, in one process, resumed.

The source's gradients are a step late in it, so that a run over clusters that goes on
need not be tested twice.
"""

import json
import shutil

import jax
import numpy as np
import pytest
import tiny_translations

from experiments import translate
from experiments.abnet import (
    checks,
    config,
    crossing,
    data,
    models,
    target_model,
    whole,
)
from nebula_jax import errors
from nebula_jax.models import transformer
from nebula_jax.runtime.life import process
from nebula_jax.training import checkpoint

STEPS, EVERY, RANKS = 4, 2, (8, 3)
RUN = {
    **tiny_translations.ALIKE,
    "steps": STEPS,
    "checkpoint_every": EVERY,
    "forward_codec": "pack_tokens|int8(row)",
    "backward_codec": "pack_tokens|int8(row)",
    "bottleneck": ",".join(map(str, RANKS)),
    "staleness": 1,
    "max_in_flight": 4,
    "held_out_pairs": 4,
    "tls": "off",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return tiny_translations.Translations(tmp_path_factory.mktemp("translations"))


@pytest.fixture(scope="module")
def split(runs):
    """A run over two clusters: its folder."""
    status, output = runs.run(workdir="split", **RUN)
    assert status == 0, output
    assert "best directions" in output
    assert "4 held-out pairs with 3 columns after step 4: loss" in output
    return runs.folder / "split"


@pytest.fixture
def trained_here(runs, monkeypatch):
    """Trains both sides in this process; returns what they saved after a step."""
    monkeypatch.chdir(runs.folder)
    monkeypatch.setattr(process.Interrupt, "install", lambda self: self)
    monkeypatch.setattr(config.Agreed, "is_evaluated", lambda self, step: False)

    def train(workdir, step=STEPS, **flags):
        run = tiny_translations.run(
            **runs.flags() | RUN | flags, workdir=workdir, cluster="whole"
        )
        checks.check(run)
        folders = data.split(run)
        target_model.prepare(run, folders[1])
        assert whole.train(run, folders) == 0
        return checkpoint.read(runs.folder / workdir / "whole" / "checkpoints", step)

    return train


def test_a_run_over_two_clusters_is_that_in_one_process_and_goes_on(
    runs, split, trained_here
):
    here = trained_here("here")
    for side, want in zip(runs.sides("split", STEPS), here, strict=True):
        tiny_translations.assert_close(side["state"], want["state"], atol=1e-5)
    began = checkpoint.read(runs.folder / "here" / "whole" / "checkpoints", EVERY)
    params, first = (
        saved[0]["state"]["params"]["bottleneck"]["kernel"] for saved in (here, began)
    )
    assert params.shape == (16, RANKS[0])
    assert np.abs(params - first).max() > 1e-4


def test_a_run_over_two_clusters_goes_on_with_the_gradient_that_was_late(runs, split):
    before = runs.sides("split", STEPS)
    shutil.copytree(split, runs.folder / "resumed")
    for side in ("source", "target"):
        last = runs.folder / "resumed" / side / "checkpoints" / f"{STEPS:08d}"
        shutil.rmtree(last)
    status, output = runs.run(workdir="resumed", **RUN)
    assert status == 0, output
    after = runs.sides("resumed", STEPS)
    tiny_translations.assert_same(after, before)
    late = after[0]["late"]
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(late)) > 0


def test_held_out_pairs_are_evaluated_with_each_rank(split):
    summary = json.loads((split / "summary.json").read_text())
    widest, narrow = summary["held_out"], summary["ranks"]["3"]
    assert widest.keys() == narrow.keys()
    assert 0 < abs(widest["loss"] - narrow["loss"]) < 2
    assert widest["tokens"] == narrow["tokens"]
    names = {path.name for path in (split / "target" / "translations").iterdir()}
    for name in ("held_out", "held_out_rank3"):
        assert {f"{name}-00000004.txt", f"{name}-00000004.scores.tsv"} <= names
    assert "dev_rank3-00000004.txt" not in names


def agreed_of(**flags):
    return tiny_translations.run(
        **tiny_translations.TINY | RUN | {"workdir": "w"} | flags
    ).agreed


def test_every_rank_has_its_share_of_steps_whatever_comes_before():
    agreed = agreed_of(bottleneck="9,6,3")
    drawn = [crossing.rank_of_step(agreed, step) for step in range(1, 3001)]
    np.testing.assert_allclose(np.bincount(drawn) / 3000, [0.5, 0.25, 0.25], atol=0.03)
    again = [crossing.rank_of_step(agreed, step) for step in range(100, 200)]
    assert again == drawn[99:199]
    other = agreed_of(bottleneck="9,6,3", seed=1)
    assert drawn != [crossing.rank_of_step(other, step) for step in range(1, 3001)]


def test_a_step_sends_the_same_columns_in_both_directions():
    agreed = agreed_of()
    x = {
        "hidden": np.ones((2, 8, 8), np.float32),
        "mask": np.ones((2, 8), bool),
        "index": np.arange(2, dtype=np.int32),
    }
    steps = {RANKS[crossing.rank_of_step(agreed, step)]: step for step in range(1, 9)}
    assert set(steps) == set(RANKS)
    for rank, step in steps.items():
        for compression in (crossing.forward(agreed), crossing.backward(agreed)):
            codec = compression.codec
            state = codec.init(x)
            sent, after = codec.encode(x, state, step)
            got, _ = codec.decode(sent, state)
            del after
            columns = np.asarray(got["hidden"]).any(axis=(0, 1))
            np.testing.assert_array_equal(columns, np.arange(8) < rank)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"bottleneck": "3,8"}, "--bottleneck=3,8: must descend, down to 1 or more"),
        ({"bottleneck": "8,8"}, "--bottleneck=8,8: must descend"),
        ({"bottleneck": "8,0"}, "--bottleneck=8,0: must descend"),
        ({"replicas": 2}, "--bottleneck=8,3 is for one pair, not --replicas=2"),
        ({"max_in_flight": 2}, "--staleness=1 needs a --max_in_flight above"),
        ({"replicas": 2, "bottleneck": ""}, "--staleness=1 is for one pair of"),
        (
            {"bottleneck": "8,7,6,5,4", "backward_codec": "pack_tokens(mask, 64)|fp16"},
            "--backward_codec=pack_tokens(mask, 64)|fp16 with --bottleneck=8,7,6,5,4"
            " has 320 shapes, of which at most 256 can be",
        ),
        (
            {"bottleneck": ",".join(map(str, range(31, 0, -1))), "staleness": 0}
            | {"forward_codec": "auto", "backward_codec": "auto"},
            "--forward_codec=auto with --bottleneck=31,30,",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(flags, problem):
    values = tiny_translations.TINY | RUN | {"workdir": "w", "cluster": "all"} | flags
    with pytest.raises(errors.SettingsError) as refused:
        checks.check(tiny_translations.run(**values))
    assert problem in str(refused.value)


def test_a_codec_may_have_as_many_shapes_as_a_frame_can_name():
    values = tiny_translations.TINY | RUN | {"workdir": "w", "cluster": "all"}
    values |= {"bottleneck": "8,7,6,5", "forward_codec": "pack_tokens(mask, 64)|fp16"}
    checks.check(tiny_translations.run(**values))  # 256


def test_more_columns_than_there_are_are_refused():
    shape = transformer.Config(40, 1, 16, 2, 32, 16)
    with pytest.raises(errors.SettingsError, match="--bottleneck=17: more than the"):
        models.model(agreed_of(bottleneck="17"), shape, shape)


def test_more_columns_than_there_are_are_refused_before_anything_starts(runs):
    flags = runs.flags() | RUN | {"bottleneck": "17", "workdir": "wide"}
    flags["source_model"] = runs.folder / "models" / "spanish"
    with pytest.raises(errors.SettingsError, match="--bottleneck=17: more than the"):
        models.load_source(tiny_translations.run(**flags))


def test_a_translation_uses_the_columns_that_are_wanted(runs, split, capsys):
    run = configured_run(runs, split)
    lines = ["la casa tiene 3 puertas", "la torre tiene 5 puertas"]
    of_all = translate.Translator(run).translate(lines)
    assert translate.Translator(run, rank=RANKS[0]).translate(lines) == of_all
    assert "was not trained" not in capsys.readouterr().err
    assert len(translate.Translator(run, rank=2).translate(lines)) == 2
    assert "--rank=2 was not trained; these were: 8, 3" in capsys.readouterr().err
    with pytest.raises(errors.SettingsError, match="--rank=9: the run has a bottlen"):
        translate.Translator(run, rank=9)
    wide = run.with_agreed(bottleneck=())
    with pytest.raises(errors.SettingsError, match="--rank=2: the run has no bottle"):
        translate.check_rank(wide.agreed, 2)


def configured_run(runs, workdir):
    flags = runs.flags() | RUN | {"workdir": str(workdir)}
    for name in ("source_model", "target_model", "data_dir", "prepared_dir"):
        flags[name] = str(runs.folder / flags[name])
    return tiny_translations.run(**flags)
