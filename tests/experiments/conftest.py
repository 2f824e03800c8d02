"""Runs of the real command, one text for all the runs of a module."""

import pytest
import tiny_runs


@pytest.fixture
def signals():
    """Puts back the handlers of signals, which a run takes."""
    with tiny_runs.handlers_put_back():
        yield


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs that share prepared text; each test names its own workdir."""
    return tiny_runs.Runs(tmp_path_factory.mktemp("runs"))
