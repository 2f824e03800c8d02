import numpy as np

from experiments.xnli import data, report


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
