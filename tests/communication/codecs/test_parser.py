import inspect

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest

from nebula_jax import errors
from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication import codecs

SPEC = jax.ShapeDtypeStruct((32, 64), jnp.float32)


def same(string, codec):
    """Whether two codecs are one program, traced and written out."""
    ours = codecs.from_string(string)
    got, want = (written(option) for option in (ours, codec))
    assert got == want
    assert ours.zstd == codec.zstd


def written(codec):
    state = codec.init(SPEC)
    programs = [
        str(jax.make_jaxpr(option.encode)(SPEC, state))
        for option in codec_lib.fixed(codec)
    ]
    return programs, str(state)


def test_a_string_means_what_the_calls_mean():
    same("", codecs.identity())
    same("  ", codecs.identity())
    same("identity", codecs.identity())
    same("svd(0.6)|fp16", codecs.chain(codecs.svd(0.6), codecs.fp16()))
    same(" svd( 0.6 ) | fp16( ) ", codecs.chain(codecs.svd(0.6), codecs.fp16()))
    same("svd(0.6, flatten=true)", codecs.svd(0.6, flatten=True))
    same("svd(flatten=true, ratio=6e-1)", codecs.svd(0.6, True))
    same("int8(row)", codecs.int8("row"))
    same("int8(64, stochastic)", codecs.int8(64, "stochastic"))
    same(
        "int8(64, stochastic, seed=3)|zstd(3)",
        codecs.chain(codecs.int8(64, "stochastic", 3), codecs.zstd(3)),
    )
    same("fp8(e5m2)", codecs.fp8("e5m2"))
    same(
        "error_feedback(top_k(.01)|fp16)",
        codecs.error_feedback(codecs.chain(codecs.top_k(0.01), codecs.fp16())),
    )
    same("error_feedback(codec=fp16)", codecs.error_feedback(codecs.fp16()))
    same(
        "from_step(2, svd(0.6)|fp16)|zstd",
        codecs.chain(
            codecs.from_step(2, codecs.chain(codecs.svd(0.6), codecs.fp16())),
            codecs.zstd(),
        ),
    )


def test_every_codec_of_the_package_has_a_name():
    """And the other way round: what a flag can say, a program can call."""
    for name, make in codecs.NAMES.items():
        assert getattr(codecs, name) is make
        assert inspect.signature(make).return_annotation is codec_lib.Codec
    assert codecs.from_string("delta(int4(64), 20000)").options
    assert codecs.from_string("pack_tokens(real, 4)|svd(0.6)|fp16").options
    assert codec_lib.ratio(codecs.from_string("svd(0.5)|fp16"), SPEC) == 0.375


@pytest.mark.parametrize(
    ("string", "problem", "caret"),
    [
        ("svd(0.6)|fp15", "unknown codec fp15; did you mean fp16?", "fp15"),
        ("qqq", "unknown codec qqq; known: bf16, delta, error_feedback, fp16, ", "qqq"),
        ("svd(0.6", "expected , or ), not the end", ""),
        ("svd(0.6))", "expected | or the end, not ')'", "))"),
        ("svd(0.6)fp16", "expected | or the end, not 'fp16'", "fp16"),
        ("svd(0.6)|", "expected a codec's name, not the end", ""),
        ("|fp16", "expected a codec's name, not '|'", "|fp16"),
        ("0.6", "expected a codec's name, not '0.6'", "0.6"),
        ("svd(,)", "expected a number, a word or a codec, not ','", ",)"),
        ("svd()", "missing a required argument: 'ratio': svd(ratio, flatten", "svd()"),
        ("svd(0.6, flat=true)", "no argument flat: svd(ratio, flatten=false", "flat="),
        ("fp16(3)", "too many arguments: fp16()", "3)"),
        ("svd(0.6, ratio=0.5)", "ratio is given twice: svd(", "ratio=0.5"),
        ("svd(ratio=0.5, true)", "arguments without a name come first", "true"),
        ("fp16|svd(1.5)", "svd: ratio must be above 0 and at most 1", "1.5)"),
        ("int8(column)", "int8: per must be tensor, row or a block's size", "column"),
        ("int8(row, up)", "int8: rounding must be nearest or stochastic", "up)"),
        ("int8(64, seed=-1)", "int8: seed must be an integer", "seed=-1"),
        ("error_feedback(row)", "codec must be a codec such as fp16, not 'row'", "row"),
        ("error_feedback(rwo|fp16)", "unknown codec rwo; known: ", "rwo"),
        ("error_feedback(fp16|svd(2))", "svd: ratio must be", "2))"),
        ("fp16|pack_tokens", "must be the first of its chain", "pack_tokens"),
        ("zstd|fp16", "must be the last of its chain", "fp16"),
        ("delta(fp16, 9)|fp16", "only zstd may follow it", "fp16"),
        ("svd(0.6)é", "expected | or the end, not 'é'", "é"),
        ("svd(1e999)", "svd: ratio must be above 0 and at most 1, not inf", "1e999"),
        (f"top_k(0.{'1' * 30})", "more than 20 digits", "0.1"),
        ("delta(" * 8 + "fp16", "more than 8 codecs in codecs", "fp16"),
    ],
)
def test_what_is_wrong_is_shown_with_a_caret(string, problem, caret):
    with pytest.raises(errors.NebulaError) as caught:
        codecs.from_string(string)
    words, shown, mark = str(caught.value).split("\n")
    assert problem in words
    assert shown == "  " + string
    position = string.rindex(caret) if caret else len(string)
    if caret == "))":
        position += 1
    assert mark == "  " + " " * position + "^"


PIECES = [*codecs.NAMES, *"|(),=", "0.6", "64", "row", "true", "ratio", "-1", " ", "é"]


@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(st.text() | st.lists(st.sampled_from(PIECES)).map("".join))
def test_any_text_is_a_codec_or_an_error_that_can_be_shown(text):
    try:
        found = codecs.from_string(text)
    except errors.NebulaError as error:
        found = str(error).split("\n")
    assert isinstance(found, codec_lib.Codec) or len(found) == 3
