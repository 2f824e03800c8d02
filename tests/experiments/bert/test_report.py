from experiments.bert import report
from nebula_jax.runtime.records import report as run_report


def records(*left_out):
    """A cluster's metrics: one record of a step each, and an evaluation."""
    steps = [
        {"step": step, "loss": 2.0, "left_out": each}
        for step, each in enumerate(left_out, 1)
    ]
    evaluation = {
        "step": len(steps),
        "held_out_mlm_loss": {"en": 1.0},
        "held_out_mlm_accuracy": {"en": 0.5},
    }
    return [*steps, evaluation]


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


def test_sequences_that_joined_rows_left_out_are_told():
    assert report.left_out(records(4.0, 2.0, 0.0)) == 2.0
    assert report.left_out(records(0.0)) == report.left_out([]) == 0.0
    left_out = {"cluster:0": 0.5, "cluster:1": 2.0}
    assert "no room for 2.0 sequences" in report.markdown(summary(left_out=left_out))
    for nothing in ({"left_out": {"whole": 0.0}}, {}):
        assert "no room" not in report.markdown(summary(**nothing))


def test_the_first_evaluation_has_its_step():
    """It need not be of step 0: a run can move from clusters into one process."""
    found = [
        {"step": step, "loss": {"en": loss}, "accuracy": {"en": 0.5}}
        for step, loss in ((15, 3.83), (20, 3.5), (23, 4.0))
    ]
    block = report.markdown(summary(held_out={"whole": found}))
    assert "| whole | 23 (15) | 4.000 (3.830) | 50.0% |" in block
