"""Means over seeds, and two rows compared, with figures worked out by hand."""

import pytest

from nebula_jax import errors
from scripts.tables import runs as table_runs
from scripts.tables import xnli_rows


def test_rows_are_compared_by_seed_and_by_test_row():
    """One test row of four is better in one language of two: an eighth."""
    plain = {"en": "1010", "sw": "1100"}
    better = {"en": "1010", "sw": "1101"}
    found = xnli_rows.compare({"0": better, "1": plain}, {"0": plain, "1": plain})
    assert found["all"]["by_seed"] == [0.125, 0.0]
    assert found["all"]["mean"] == pytest.approx(0.0625)
    assert found["far"]["by_seed"] == [0.25, 0.0]
    # The row comes 0 to 4 times in a draw of four; in 95 % of them at most 3 times.
    low, high = found["far"]["interval"]
    assert low == 0.0
    assert high == pytest.approx(0.125 * 3)
    same = xnli_rows.compare({"0": plain}, {"0": plain})
    assert same["all"]["interval"] == [0.0, 0.0]


def summary(**accuracy):
    """Of a fine-tuning, with its accuracies."""
    test = {"accuracy": accuracy, "rows": {"en": 9}, "warnings": []}
    return {"test": test, "text": {"labels": {"train": {"en": {"neutral": 5}}}}}


def test_seeds_have_a_mean_and_a_deviation():
    """The two seeds' averages are alike, though no language is."""
    runs = [summary(en=0.7, sw=0.5), summary(en=0.8, sw=0.4)]
    found = xnli_rows.means(runs)
    assert found["accuracy"] == pytest.approx({"en": 0.75, "sw": 0.45, "average": 0.6})
    deviation = 0.1 / 2**0.5
    wanted = {"en": deviation, "sw": deviation, "average": 0.0}
    assert found["deviation"] == pytest.approx(wanted, abs=1e-9)
    assert xnli_rows.means(runs[:1])["deviation"]["en"] == 0.0


def predictions(folder, language, *lines):
    text = "\n".join(["id\tlabel\tprediction", *lines])
    (folder / f"test.{language}.tsv").write_text(text)


def test_rows_that_are_right_are_marked(tmp_path):
    folder = tmp_path / "finetune" / "predictions"
    folder.mkdir(parents=True)
    predictions(folder, "en", "7\tyes\tyes", "8\tno\tyes")
    predictions(folder, "sw", "7\tyes\tno", "8\tno\tno")
    run = table_runs.Run("a", xnli_rows.MODULE, ())
    assert xnli_rows.figures(run, tmp_path)["right"] == {"en": "10", "sw": "01"}
    assert "right" not in xnli_rows.figures(run._replace(module="m"), tmp_path)


@pytest.mark.parametrize(
    "lines", [["8\tno\tno", "7\tyes\tno"], ["7\tyes\tno"]], ids=["order", "fewer"]
)
def test_languages_whose_rows_are_other_pairs_are_not_put_together(tmp_path, lines):
    predictions(tmp_path, "en", "7\tyes\tyes", "8\tno\tyes")
    predictions(tmp_path, "sw", *lines)
    with pytest.raises(errors.NebulaError, match=r"test\.sw\.tsv and test\.en\.tsv"):
        xnli_rows.right(tmp_path)
