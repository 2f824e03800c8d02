"""The cosine of two trees of arrays."""

import numpy as np
import pytest

from nebula_jax.parallel import cosine


def test_gradients_that_are_no_numbers_have_no_cosine():
    one = {"a": np.float32([1, 2]), "b": np.float32([[3]])}
    assert cosine.similarity(one, one) == pytest.approx(1)
    other = {"a": np.float32([-1, -2]), "b": np.float32([[-3]])}
    assert cosine.similarity(one, other) == pytest.approx(-1)
    spoiled = {"a": one["a"] * np.nan, "b": one["b"]}
    assert cosine.similarity(one, spoiled) == -1
    small = {name: 1e-13 * value for name, value in one.items()}
    assert cosine.similarity(one, small) == pytest.approx(1)
    assert cosine.similarity(small, small) == pytest.approx(1)
    nothing = {"a": np.zeros(2, np.float32), "b": np.zeros((1, 1), np.float32)}
    assert cosine.similarity(one, nothing) == -1
