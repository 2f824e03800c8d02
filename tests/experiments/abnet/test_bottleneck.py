"""A run with a bottleneck: over clusters and in one process; resumed: test_control."""

import numpy as np
import pytest
import tiny_translations

from experiments import translate
from experiments.abnet import models
from nebula_jax import errors
from nebula_jax.models import transformer

STEPS, EVERY, WIDTH = 4, 2, 8
RUN = {
    **tiny_translations.ALIKE,
    "steps": STEPS,
    "checkpoint_every": EVERY,
    "forward_codec": "pack_tokens|int8(row)",
    "backward_codec": "pack_tokens|int8(row)",
    "bottleneck": WIDTH,
    "held_out_pairs": 4,
    "tls": "off",
}


@pytest.fixture(scope="module")
def split(runs):
    """A run over two clusters: its folder."""
    output = runs.finished(workdir="split", **RUN)
    assert "best directions" in output
    return runs.folder / "split"


def test_a_run_over_two_clusters_is_that_in_one_process_and_trains_the_neck(
    runs, split
):
    runs.finished(workdir="here", cluster="whole", **RUN)
    here = runs.sides("here", STEPS)
    for side, want in zip(runs.sides("split", STEPS), here, strict=True):
        tiny_translations.assert_close(side["state"], want["state"], atol=1e-5)
    params, first = (
        sides[0]["state"]["params"]["bottleneck"]["kernel"]
        for sides in (here, runs.sides("here", EVERY))
    )
    assert params.shape == (16, WIDTH)
    assert np.abs(params - first).max() > 1e-4


def test_more_columns_than_there_are_are_refused_before_anything_starts(runs):
    flags = runs.flags() | RUN | {"bottleneck": 17, "workdir": "wide"}
    flags["source_model"] = runs.folder / "models" / "spanish"
    run = tiny_translations.run(**flags)
    with pytest.raises(errors.SettingsError, match="--bottleneck=17: more than the"):
        models.load_source(run)
    shape = transformer.Config(40, 1, 16, 2, 32, 16)
    with pytest.raises(errors.SettingsError, match="--bottleneck=17: more than the"):
        models.model(run.agreed, shape, shape)


def test_a_run_with_a_bottleneck_translates(runs, split):
    flags = runs.flags() | RUN | {"workdir": str(split)}
    for name in ("source_model", "target_model", "data_dir", "prepared_dir"):
        flags[name] = str(runs.folder / flags[name])
    run = tiny_translations.run(**flags)
    lines = ["la casa tiene 3 puertas", "la torre tiene 5 puertas"]
    assert len(translate.Translator(run).translate(lines)) == 2
