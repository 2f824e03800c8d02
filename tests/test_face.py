"""The public names: one list, in the package, its docstring and the API pages."""

import doctest
import importlib
import inspect
import re

import jax.numpy as jnp
import optax
import pdoc
import pdoc.doc
import pytest

import nebula_jax as nebula
from nebula_jax.face import state

PAGES = ["nebula_jax", "nebula_jax.face", "nebula_jax.communication.codecs"]
"""What the guide builds pages of."""


def test_the_list_and_the_docstring_agree():
    listed = re.findall(r"^    (\w+) +\S", nebula.__doc__, re.MULTILINE)
    assert sorted(set(listed) - {"import"}) == nebula.__all__
    assert set(dir(nebula)) == {*nebula.__all__, "__version__"}


def test_each_name_has_a_sentence_and_an_example():
    for name in nebula.__all__:
        found = getattr(nebula, name)
        text = inspect.getdoc(found)
        assert re.match(r"[A-Z][^\n]*[.:]", text), name
        if name != "errors":
            assert re.search(r"^ {4}\S|>>> ", text, re.MULTILINE), name


def test_the_examples_run():
    names = {"nebula": nebula, "jnp": jnp, "optax": optax}
    found = doctest.testmod(state, extraglobs=names)
    assert found.attempted
    assert not found.failed


def test_a_name_that_is_not_public_is_named():
    with pytest.raises(AttributeError, match="no public name 'bridge'"):
        nebula.bridge  # noqa: B018


@pytest.mark.filterwarnings("error::UserWarning:pdoc")
def test_the_api_pages_have_every_name(tmp_path):
    pdoc.pdoc(*PAGES, output_directory=tmp_path)
    pages = {path.stem: path.read_text() for path in tmp_path.rglob("*.html")}
    for name in nebula.__all__:
        found = getattr(nebula, name)
        if not inspect.ismodule(found):
            assert f'id="{name}"' in pages["nebula_jax"], name
    for page in ("cut", "codecs"):
        module = importlib.import_module(getattr(nebula, page).__name__)
        for name in pdoc.doc.Module(module).members:
            if name.startswith("_"):
                continue
            assert f'id="{name}"' in pages[page], name
