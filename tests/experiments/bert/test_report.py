from experiments.bert import report
from nebula_jax.runtime.records import report as run_report


def summary(**values):
    """A summary.json, as far as its Markdown needs it."""
    given = {
        **run_report.provenance(60.0),
        "vocab_size": 100,
        "flags": {"seed": 0},
        "clusters": [],
        "losses": {},
        "restarts": {},
        "bytes": {},
        "held_out": {},
    }
    return given | values


def test_the_first_evaluation_has_its_step():
    """It need not be of step 0: a run can move from clusters into one process."""
    found = [
        {"step": step, "loss": {"en": loss}, "accuracy": {"en": 0.5}}
        for step, loss in ((15, 3.83), (20, 3.5), (23, 4.0))
    ]
    block = report.markdown(summary(held_out={"whole": found}))
    assert "| whole | 23 (15) | 4.000 (3.830) | 50.0% |" in block
