import contextlib

import pytest
import quorum_star


@pytest.fixture
def star():
    """Makes a hub with its leaves; all are closed after the test."""
    with contextlib.ExitStack() as stack:
        yield lambda **given: quorum_star.Star(stack, **given)
