import doctest
import importlib

import pytest

from nebula_jax.communication import codecs

MODULES = (
    "bits",
    "block_floats",
    "block_sparse",
    "conformance",
    "floats",
    "integers",
    "leaves",
    "low_rank",
    "packing",
    "parser",
    "rotations",
    "wrappers",
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name):
    module = importlib.import_module(f"nebula_jax.communication.codecs.{name}")
    result = doctest.testmod(module)
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
