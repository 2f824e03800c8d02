import numpy as np
import pytest

from nebula_jax.runtime.records import nonfinite


def outcome(loss, is_finite=False):
    return {"loss": np.float32(loss), "is_finite": np.bool_(is_finite)}


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (np.nan, "^g:0: the loss of step 7 is nan; nothing after it is saved"),
        (np.inf, "^g:0: the loss of step 7 is inf; "),
        (2.5, "^g:0: step 7 has the loss 2.5, but its gradient or the parameters"),
    ],
)
def test_without_leave_the_first_step_is_the_end(loss, words):
    skips = nonfinite.Skips("g:0", allowed=0)
    skips.take(6, outcome(1.0, is_finite=True))
    skips.take(6, {"loss": np.float32(1.0)})  # of a step that does not tell
    with pytest.raises(nonfinite.NonfiniteError, match=words):
        skips.take(7, outcome(loss))


def test_so_many_are_skipped_counted_and_reported(capsys):
    found = []
    record = lambda step, count: found.append((step, count))  # noqa: E731
    skips = nonfinite.Skips("g:0", 3, 1, record)
    skips.take(7, outcome(np.nan))
    skips.take(8, outcome(1.0, is_finite=True))
    skips.take(9, outcome(np.nan))
    assert found == [(7, 2), (9, 3)]
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "g:0: the loss of step 7 is nan: skipped, 2 of 3"
    with pytest.raises(nonfinite.NonfiniteError, match=r"step 10 .*_nonfinite=3"):
        skips.take(10, outcome(np.nan))
    assert skips.count == 3
