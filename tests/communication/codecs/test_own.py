"""A codec of one's own by its module and name, wherever a string takes a codec."""

import sys

import jax.numpy as jnp
import pytest

from nebula_jax.communication import codecs, selector

MODULE = """
import jax.numpy as jnp
from nebula_jax.communication import codecs

def scaled(by, inner=codecs.fp16(), loud=False, kind="row", dtype=jnp.float32):
    if by == 0:
        raise ValueError(f"by must not be 0, but {by}")
    if by == 13:
        return {}["thirteen"]
    plain = codecs.stateless(lambda x: x * by, lambda x: x / by, "of no interest")
    return codecs.chain(plain, inner)

HALF = codecs.stateless(lambda x: x / 2, lambda x: x * 2)
EIGHT = 8

def chosen():
    return codecs.from_step(3, HALF)

def nothing():
    return None

def many(*sizes):
    return HALF

class Kinds:
    half = HALF
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with `my_codecs.py`, which is not on Python's path yet."""
    (tmp_path / "my_codecs.py").write_text(MODULE)
    (tmp_path / "typo.py").write_text("import jax\n\ndef signs(:\n")
    (tmp_path / "needs.py").write_text("import no_such_thing\n")
    (tmp_path / "script.py").write_text("raise SystemExit(2)\n")
    (tmp_path / "my_pkg").mkdir()
    (tmp_path / "my_pkg" / "more.py").write_text("from my_codecs import scaled\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("my_codecs", "my_pkg", "my_pkg.more"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("string", "name"),
    [
        (
            "my_codecs:scaled(0.5, loud=true, inner=int8(64)|bf16) | fp16|zstd(3)",
            "my_codecs:scaled(0.5, int8(64)|bf16, true, row)|fp16",
        ),
        ("my_codecs:Kinds.half|fp16", "my_codecs:Kinds.half|fp16"),
        ("my_codecs:chosen|fp16", "my_codecs:chosen|fp16"),
        (
            "error_feedback(my_pkg.more:scaled(2, my_codecs:HALF), 0.9)",
            "error_feedback(my_pkg.more:scaled(2, my_codecs:HALF, false, row), 0.9)",
        ),
    ],
)
def test_a_codec_of_a_module_is_a_codec_like_any(folder, string, name):
    """Both clusters compare the name, so it has the module and all arguments."""
    codec = selector.as_selector(codecs.from_string(string))
    assert codec.name == name
    assert codecs.from_string(name).name == name
    payload, _ = codec.encode(jnp.ones(64), codec.init(jnp.ones(64)))
    got, _ = codec.decode(payload, codec.init(jnp.ones(64)))
    assert got.tolist() == pytest.approx([1.0] * 64, rel=0.01)


@pytest.mark.parametrize(
    ("string", "problem", "caret"),
    [
        ("fp16|no_such:signs", "there is no module no_such in ", "no_such:"),
        ("my_codecs.py:HALF", "; write it without .py", "my_codecs"),
        ("./my_codecs:HALF", "unexpected '/'; a codec of one's own", "/"),
        ("my_codecs:sign", "my_codecs has no sign", "my_codecs"),
        ("my_codecs:EIGHT", "neither a codec nor a function that makes one: 8", "my_"),
        ("my_codecs:HALF(2)", "is a codec, so it has no arguments", "my_codecs"),
        ("my_codecs:nothing", "it returned no codec, but None", "my"),
        ("my_codecs:many(3)", "argument *sizes has no name", "my_codecs"),
        ("my_codecs:scaled", "argument by is missing: my_codecs:scaled(by, ", "my_cod"),
        ("my_codecs:scaled(0)", "by must not be 0, but 0", "0)"),
        ("my_codecs:scaled(2, bye=3)", "no argument bye: my_codecs:scaled(", "bye"),
        ("fp16|my_codecs:scaled(13)", "'thirteen' (my_codecs.py, line 9)", "my_codecs"),
        ("typo:signs", "typo cannot be imported: SyntaxError: ", "typo"),
        ("needs:x", "needs cannot be imported: ModuleNotFound", "needs"),
        ("script:x", "script cannot be imported: SystemExit: 2 (script.py, ", "script"),
    ],
)
def test_what_is_wrong_is_shown_with_a_caret(folder, string, problem, caret):
    with pytest.raises(codecs.CodecError) as caught:
        codecs.from_string(string)
    words, shown, mark = str(caught.value).split("\n")
    assert problem in words
    assert shown == "  " + string
    assert mark == "  " + " " * string.index(caret) + "^"


def test_the_error_of_a_module_keeps_its_traceback(folder):
    with pytest.raises(codecs.CodecError) as caught:
        codecs.from_string("my_codecs:scaled(13)")
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("has_folder", [False, True])
def test_the_folder_of_a_command_comes_last_on_the_path(folder, has_folder):
    """Of a script elsewhere it is not on it yet, as it is of `python -m`."""
    before = [each for each in sys.path if each] + [""] * has_folder
    sys.path[:] = before
    assert codecs.from_string("my_codecs:HALF").name == "my_codecs:HALF"
    assert sys.path == before + [str(folder)] * (not has_folder)
