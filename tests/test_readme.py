"""What the README shows is so."""

import doctest
import pathlib

README = pathlib.Path(__file__).parents[1] / "README.md"


def test_its_examples_run():
    results = doctest.testfile(str(README), module_relative=False)
    assert results.attempted and not results.failed
