import json

import pytest

from nebula_jax import errors
from scripts import make_tables

SUMMARY = {
    "command": "python -m experiments.pretrain_m3 --flagfile=f.flags",
    "commit": "abc123",
    "hardware": {"cpu": "a CPU", "cores": 2, "python": "3.11.7", "jax": "0.10.2"},
    "seconds": 90.0,
    "vocab_size": 4000,
    "flags": {"seed": 7},
    "bytes": {"per_position": 1.9, "formula_per_position": 1.8, "per_token": 2.2},
    "losses": {"discriminator": {"first": 40.0, "last": 20.5}},
    "clusters": [
        {
            "cluster": "discriminator",
            "last_step": 10,
            "tokens_per_second": 1234.5,
            "bytes_sent": 1_000_000,
            "bytes_received": 2_500_000,
            "waited_seconds": 1.0,
            "seconds": 4.0,
        }
    ],
    "held_back": [
        {"step": step, "languages": {"en": {
            "rtd_auc": auc, "fake_token_rate": fakes,
            "sampled_mlm_accuracy": 0.05, "clm_accuracy": 0.1,
        }}}
        for step, auc, fakes in ((0, 0.5, 0.14), (10, 0.75, 0.15))
    ],
}  # fmt: skip


def test_the_committed_readme_is_what_the_script_makes_of_the_results():
    committed = (make_tables.EXPERIMENTS / "README.md").read_text()
    message = "run: scripts/run python -m scripts.make_tables"
    assert make_tables.readme() == committed, message
    for name in ("m3_quickstart", "m3_xnli15_tiny"):
        block = committed.partition(f"<!-- begin {name} -->")[2].partition("<!--")[0]
        assert block.count("\n| ") > 15, f"no results of {name}"


def test_a_block_holds_command_commit_hardware_time_seed_and_every_figure():
    block = make_tables.m3_block("run", SUMMARY)
    for part in (
        "--flagfile=f.flags",
        "Commit abc123, seed 7, 2 cores of a CPU",
        "1.5 minutes",
        "| discriminator | 10 | 40.000 → 20.500 | 1,234 | 1.00 MB | 2.50 MB | 25% |",
        "| en | 0.750 (0.500) | 15.0% (14.0%) | 5.0% | 10.0% |",
        "![Losses and RTD AUC of run](results/run.png)",
    ):
        assert part in block


def test_only_what_is_between_the_markers_changes():
    text = "a\n<!-- begin x -->\nold\n<!-- end x -->\nb\n"
    new = make_tables.rewrite(text, "x", "new\n")
    assert new == "a\n<!-- begin x -->\nnew\n<!-- end x -->\nb\n"
    with pytest.raises(errors.NebulaError, match="no markers for y"):
        make_tables.rewrite(text, "y", "new")


def test_an_unfinished_run_is_not_collected(tmp_path):
    with pytest.raises(errors.NebulaError, match=r"no summary\.json"):
        make_tables.collect(tmp_path, tmp_path / "results")


def test_a_resumed_run_of_clusters_is_not_collected_as_its_times_are_partial(tmp_path):
    trained = SUMMARY["clusters"][0] | {"first_step": 5}
    summary = SUMMARY | {"clusters": [trained]}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(errors.NebulaError, match="was resumed"):
        make_tables.collect(tmp_path, tmp_path / "results")


def test_a_run_is_collected_without_its_examples_of_a_clean_commit_alone(tmp_path):
    run, results = tmp_path / "xnli_run", tmp_path / "results"
    run.mkdir()
    for commit, is_clean in (
        *(("abc123+", False), ("unknown", False), ("abc123, def456+", False)),
        *(("abc123", True), ("abc123, def456", True)),
    ):
        summary = {
            "commit": commit,
            "training": {"first_step": 5},
            "examples": ["somebody's sentence"],
        }
        (run / "summary.json").write_text(json.dumps(summary))
        if not is_clean:
            with pytest.raises(errors.NebulaError, match="not a clean checkout"):
                make_tables.collect(run, results)
    assert make_tables.collect(run, results) == "xnli_run"
    kept = json.loads((results / "xnli_run.json").read_text())
    assert kept == {"commit": "abc123, def456", "training": {"first_step": 5}}
