"""What the README shows is so."""

import doctest
import pathlib

ROOT = pathlib.Path(__file__).parents[1]
README = ROOT / "README.md"


def test_its_examples_run():
    results = doctest.testfile(str(README), module_relative=False)
    assert results.attempted
    assert not results.failed


def test_the_split_model_is_quoted_as_it_is():
    source = (ROOT / "experiments" / "split_your_model.py").read_text()
    start, end = source.index("def front("), source.index("# The rest is the data")
    lines = [line for line in source[start:end].splitlines() if line]
    quoted = [line.removeprefix("    ") for line in README.read_text().splitlines()]
    first = quoted.index(lines[0])
    assert [line for line in quoted[first:] if line][: len(lines)] == lines
