"""The examples in docstrings: each runs, and prints what it says."""

import doctest
import importlib
import pathlib

import pytest

import nebula_jax

ROOT = pathlib.Path(nebula_jax.__file__).parent
FILES = [
    str(path.relative_to(ROOT.parent))
    for path in sorted(ROOT.rglob("*.py"))
    if ">>> " in path.read_text() and path.parent.name != "face"  # test_face has those
]


@pytest.mark.parametrize("file", FILES)
def test_examples_in_docstrings_run(file):
    name = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    result = doctest.testmod(
        importlib.import_module(name), optionflags=doctest.ELLIPSIS
    )
    assert result.attempted > 0
    assert result.failed == 0
