"""Trees of arrays compared, leaf by leaf."""

import jax
import numpy as np


def assert_same(got, want):
    """Two trees of one structure and the same values."""
    jax.tree.map(np.testing.assert_array_equal, got, want)


def assert_close(got, want, **tolerance):
    """Two trees of one structure and nearly the same values, as `assert_allclose`."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), got, want)
