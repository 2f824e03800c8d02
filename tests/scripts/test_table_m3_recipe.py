"""The probes of M3's recipes: flags that can be, figures, Markdown and picture."""

import math

import configured
import pytest

from experiments.m3 import config as m3_config
from scripts import table_m3_recipe
from scripts.tables import recipe_markdown
from scripts.tables import runs as table_runs


def summary(last_gap, loss):
    """What a run of two generators leaves."""
    figures = {
        **{"rtd_auc": 0.9, "fake_token_rate": 0.15, "sampled_mlm_accuracy": 0.02},
        **{"clm_accuracy": 0.11, "unigram_accuracy": 0.08},
    }
    norms = {
        f"{name}_gradient": 2.0
        for name in ("rtd_encoder", "clm_encoder", "rtd_heads", "clm_heads")
    }
    right = {"de": 1.0, "sw": 0.5}
    return {
        "probes": [
            {
                "step": 0,
                "translation_gap": {"de": 0.15, "sw": 0.13},
                "retrieval": right,
            },
            {
                **{"step": 100, "retrieval": right, **norms},
                "translation_gap": {"de": last_gap, "sw": last_gap},
            },
        ],
        "held_out": [{"step": 100, "languages": {"de": figures, "sw": figures}}],
        "generators": [
            {"name": "generator:0", "loss": loss, "unigram_entropy": 7.2},
            {"name": "generator:1", "loss": loss, "unigram_entropy": 7.0},
        ],
        **{"seconds": 120.0, "commit": "abc"},
    }


def test_the_flags_of_every_recipe_can_be():
    keys = [row.key for row in table_m3_recipe.ROWS]
    assert len(set(keys)) == len(keys)
    flagfile = table_runs.flagfile(table_m3_recipe.PRETRAINING)
    for row in table_m3_recipe.ROWS:
        arguments = [*table_m3_recipe.COMMON, *row.arguments]
        run = configured.run(m3_config, f"--flagfile={flagfile}", *arguments)
        run.agreed.start(run.agreed.teacher_gate)
        assert run.agreed.discriminator_layers == 6


def test_a_recipe_that_does_not_keep_the_gap_is_marked(tmp_path):
    rows = [
        table_m3_recipe.figures_of(table_m3_recipe.ROWS[0], summary(0.02, 7.1)),
        table_m3_recipe.figures_of(table_m3_recipe.ROWS[5], summary(0.135, 5.5)),
    ]
    assert rows[0]["gaps"] == [(0, pytest.approx(0.14)), (100, 0.02)]
    record = {
        **{"rows": rows, "steps": 100, "kept": table_m3_recipe.KEPT, "seeds": ["0"]},
        **{"command": "c", "commit": "abc", "seconds": 240.0, "hardware": {}},
    }
    record["hardware"] = {
        "cpu": "C", "cores": 2, "devices": "cpu", "python": "3.11", "jax": "0.10"
    }  # fmt: skip
    before, after = (
        line
        for line in recipe_markdown.markdown(record).splitlines()
        if line.startswith(("| as before", "| + generators"))
    )
    assert "0.140 → 0.020 | 14% (no) | 75% → 75%" in before
    assert "7.10 (7.20), 7.10 (7.00)" in before
    assert "0.140 → 0.135 | 96% |" in after
    assert "11.0% (8.0%)" in after
    path = tmp_path / "gap.png"
    recipe_markdown.picture(record, path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("nothing", [None, math.nan])
def test_figures_that_are_not_finite_leave_a_table_and_a_picture(tmp_path, nothing):
    """A record has them as null."""
    found = summary(nothing, nothing)
    found["probes"][-1]["rtd_encoder_gradient"] = nothing
    for figures in found["held_out"][-1]["languages"].values():
        figures |= {"clm_accuracy": nothing, "rtd_auc": nothing}
    row = table_m3_recipe.figures_of(table_m3_recipe.ROWS[0], found)
    about = {"cpu": "C", "cores": 2, "devices": "cpu", "python": "3", "jax": "0"}
    record = {
        **{"rows": [row], "steps": 100, "kept": table_m3_recipe.KEPT, "seeds": ["0"]},
        **{"command": "c", "commit": "a", "seconds": 240.0, "hardware": about},
    }
    (line,) = (
        line
        for line in recipe_markdown.markdown(record).splitlines()
        if line.startswith("| as before")
    )
    assert "| 0.140 → – | – | 75% → 75% |" in line
    assert "| – (8.0%) | – (7.20), – (7.00) |" in line
    recipe_markdown.picture(record, tmp_path / "gap.png")
