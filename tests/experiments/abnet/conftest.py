"""Runs of train_abnet, one text and the same models for all the runs of a module."""

import pytest
import tiny_translations


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs that share text and models; each test names its own workdir."""
    folder = tmp_path_factory.mktemp("translations")
    return tiny_translations.Translations(folder)
