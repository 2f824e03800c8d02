import numpy as np

from experiments.xnli import data, report

LABELS = {"entailment": 2, "neutral": 3, "contradiction": 5}


def summary(first_step):
    return {
        "command": "python -m experiments.finetune_xnli --flagfile=f.flags",
        "commit": "abc123",
        "hardware": {"cpu": "a CPU", "cores": 2, "python": "3.11.7", "jax": "0.10.2"},
        "seconds": 90.0,
        "flags": {"seed": 7, "encoder": "e5-small"},
        "text": {"labels": {"train": {"en": LABELS}}},
        "dev": [{"step": 50, "accuracy": 0.5}, {"step": 100, "accuracy": 0.75}],
        "selected_step": 100,
        "training": {
            "first_step": first_step,
            "last_step": 100,
            "tokens_per_second": 1234.5,
        },
        "test": {
            "accuracy": {"en": 0.75, "sw": 0.5},
            "average": 0.625,
            "rows": {"en": 10, "sw": 10},
            "labels": {"en": [2, 3, 5], "sw": [2, 3, 5]},
            "predicted": {"en": [2, 4, 4], "sw": [10, 0, 0]},
            "warnings": ["sw: no better than a guess"],
        },
    }


def test_the_markdown_holds_command_commit_hardware_time_seed_and_every_figure():
    block = report.markdown(summary(first_step=1))
    for part in (
        "--flagfile=f.flags",
        "Commit abc123, seed 7, 2 cores of a CPU",
        "1.5 minutes, 10 English pairs, 1,234 tokens/s",
        "English dev (after step): 50.0% (50), 75.0% (100). Tested: step 100 of 100.",
        "**test pairs, e5-small after step 100**",
        "| en | 10 | 75.0% | 2 / 3 / 5 | 2 / 4 / 4 |",
        "| sw | 10 | 50.0% | 2 / 3 / 5 | 10 / 0 / 0 |",
        "| average | | 62.5% | | |",
        "- sw: no better than a guess",
    ):
        assert part in block
    assert "resumed" not in block


def test_a_resumed_run_states_the_part_that_its_time_is_of():
    block = report.markdown(summary(first_step=61))
    assert "The run was resumed after step 60: minutes and tokens/s are of" in block


def test_a_language_at_chance_is_warned_of(capsys):
    """From a classifier's predictions to what a person reads."""
    labels = np.repeat([0, 1, 2], [30, 20, 50]).astype(np.int32)
    parts = dict.fromkeys(("en", "sw"), data.Part(None, labels))
    right, always_first = np.eye(3)[labels], np.eye(3)[np.zeros(100, int)]
    scores = report.evaluate(parts, {"en": right, "sw": always_first})
    results = report.as_json(scores)
    assert results["accuracy"] == {"en": 1.0, "sw": 0.3}
    assert results["labels"] == {"en": [30, 20, 50], "sw": [30, 20, 50]}
    assert results["predicted"] == {"en": [30, 20, 50], "sw": [100, 0, 0]}
    report.show(report.results_markdown(results, "a table"), results["warnings"])
    printed = capsys.readouterr()
    warnings = [line for line in printed.err.splitlines() if "warning" in line]
    assert len(warnings) == 2  # no better than chance, and one label for all
    assert all(" sw" in line for line in warnings)
    assert "100 / 0 / 0" in printed.out
