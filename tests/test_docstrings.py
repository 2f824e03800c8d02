"""The examples in docstrings: each runs, and prints what it says."""

import doctest
import importlib
import pathlib

import pytest

import nebula_jax
from nebula_jax.communication import codecs

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


def test_every_codec_says_what_it_does_in_the_same_way():
    for name, make in codecs.NAMES.items():
        text = make.__doc__
        for word in ("Payload", "ire", "NaN", ">>>"):
            assert word in text or (name, word) == ("identity", ">>>"), (name, word)
        if make.__code__.co_argcount:
            assert "Args:" in text, name
            assert "Raises:" in text, name
