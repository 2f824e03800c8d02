import json

from experiments.bert import report
from scripts.tables import config


def test_the_first_evaluation_has_its_step():
    """It need not be of step 0: a run can move from clusters into one process."""
    path = config.FOLDER / "results" / "bert_quickstart.json"
    found = [
        {"step": step, "loss": {"en": loss}, "accuracy": {"en": 0.5}}
        for step, loss in ((15, 3.83), (20, 3.5), (23, 4.0))
    ]
    summary = json.loads(path.read_text()) | {"held_out": {"whole": found}}
    assert "| whole | 23 (15) | 4.000 (3.830) | 50.0% |" in report.markdown(summary)
