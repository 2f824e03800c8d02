import numpy as np
import pytest

from nebula_jax.evaluation import rtd


def test_the_entropy_of_counts_by_hand():
    found = rtd.Unigrams(10)
    assert found.entropy() is None
    found.add(np.array([[2, 5, 6, 3], [2, 5, 5, 0]]))
    found.add(np.array([6, 7, 7]))
    assert found.entropy() is None  # of seven tokens
    found.add(np.array([5, 5, 5, 6, 6, 7, 7]))
    # 5 six times, 6 and 7 four times each; 2, 3 and 0 are no text.
    expected = -(3 / 7 * np.log(3 / 7) + 2 * 2 / 7 * np.log(2 / 7)) + 2 / 28
    assert found.entropy() == pytest.approx(expected)


@pytest.mark.parametrize("pieces", [500, 40_000])
def test_what_two_steps_leave_has_no_entropy_and_more_has_nearly_the_right_one(pieces):
    """A generator whose text looked more regular than it is would be blamed for it."""
    shares = 1 / (np.arange(pieces) + 2.7)
    shares /= shares.sum()
    truth = -np.sum(shares * np.log(shares))
    random = np.random.default_rng(0)
    found = rtd.Unigrams(pieces + 5)
    seen = []
    for _ in range(100):
        found.add(random.choice(np.arange(5, pieces + 5), size=960, p=shares))
        seen.append(found.entropy())
    assert seen[0] is None
    assert seen[-1] == pytest.approx(truth, abs=0.15)
    errors = [abs(each - truth) for each in seen if each is not None]
    assert max(errors) < 0.2
