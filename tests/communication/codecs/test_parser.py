import math

import hypothesis
import hypothesis.strategies as st
import pytest

from nebula_jax import errors
from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication import codecs, selector

NAMED = [
    *("identity", "fp16", "bf16"),
    *("private(1, 0)", "private(1.0000001, 0)", "private(1, 0.25)"),
    *("int8(64)", "int8(32)", "int8(row)", "int4(64)"),
    *("svd(0.6, false)", "svd(0.6, true)", "svd(0.5, false)"),
    *("pack_ids(100)", "pack_ids(101)", "pack_tokens(mask, 8)", "pack_tokens(mask, 4)"),
    *("pack_tokens(real, 8)", "hadamard(256, 0)", "hadamard(256, 1)"),
    *("from_step(2, fp16)", "from_step(3, fp16)", "from_step(2, bf16)"),
    *("e3m0(64)", "sparse_loco(32, 1024)", "error_feedback(fp16)"),
    "error_feedback(sparse_loco(64, 4096), 0.95)",
    "svd(0.6, false)|fp16",
    "fp16|svd(0.6, false)",
    "pack_tokens(mask, 8)|svd(0.6, false)|fp16",
    "error_feedback(svd(0.1, false)|fp16)",
    "error_feedback(from_step(2, fp16))",
    "error_feedback(from_step(2, int8(64)|bf16), 0.9)",
]


@pytest.mark.parametrize("name", NAMED)
def test_the_name_of_a_codec_is_its_string_with_all_arguments(name):
    """So codecs that differ in any argument have different names."""
    assert codecs.from_string(name).name == name


def same(string, codec, zstd=None):
    """Asserts that two codecs are one, which has its arguments in its name."""
    found = codecs.from_string(string)
    assert found.name == codec.name
    assert type(found) is type(codec)
    assert found.zstd == zstd


def test_a_string_means_what_the_calls_mean():
    same("", codecs.identity())
    same("  ", codecs.identity())
    same(" svd( 0.6 ) | fp16( ) ", codecs.chain(codecs.svd(0.6), codecs.fp16()))
    same("svd(0.6, flatten=true)", codecs.svd(0.6, flatten=True))
    same("svd(flatten=true, ratio=6e-1)", codecs.svd(0.6, True))
    same("int8(row)", codecs.int8("row"))
    same("int8(per=64)|zstd(3)", codecs.int8(64), zstd=3)
    same(
        "error_feedback(svd(.01)|fp16)",
        codecs.error_feedback(codecs.chain(codecs.svd(0.01), codecs.fp16())),
    )
    same("e3m0|zstd", codecs.e3m0(256), zstd=1)
    same(
        "error_feedback(sparse_loco, beta=0.95)",
        codecs.error_feedback(codecs.sparse_loco(32, 4096), 0.95),
    )
    same(
        "from_step(2, svd(0.6)|fp16)|zstd",
        codecs.from_step(2, codecs.chain(codecs.svd(0.6), codecs.fp16())),
        zstd=1,
    )
    three = codecs.int8("row"), codecs.bf16(), codecs.int4(64)
    same("int8(row)|bf16|int4(64)", codecs.chain(*three))
    zipped = codecs.chain(codecs.svd(0.6), codecs.fp16(), codecs.zstd(3))
    same("svd(0.6)|fp16|zstd(3)", zipped, zstd=zipped.zstd)
    same("zstd(level=19)", codecs.identity(), zstd=19)
    same("identity|fp16|zstd", codecs.fp16(), zstd=1)
    same("(svd(0.6)|fp16)|zstd", codecs.chain(codecs.svd(0.6), codecs.fp16()), zstd=1)


@pytest.mark.parametrize(
    "string",
    ["error_feedback(int8(64)|zstd(4))", "from_step(2, error_feedback(zstd(4)))"],
)
def test_zstd_inside_a_wrapper_is_the_channels_too(string):
    """There is one place for it only: after everything."""
    assert codecs.from_string(string).zstd == 4
    with pytest.raises(codecs.CodecError, match="must be the last of its chain"):
        codecs.from_string(f"{string}|zstd")


NO_RATIO = (0, 1.01, math.nan, "r", True)


@pytest.mark.parametrize(
    ("make", "arguments", "words"),
    [
        *((codecs.svd, (ratio,), "ratio must be") for ratio in NO_RATIO),
        (codecs.svd, (0.5, "yes"), "flatten must be"),
        *((codecs.zstd, (level,), "level must be 1 to 19")
          for level in (0, 20, 3.0, True, "fast")),
        (codecs.e3m0, (0,), "block must be an integer of at least 1, not 0"),
        (codecs.sparse_loco, (0,), "k must be 1 to 4096, not 0"),
        (codecs.sparse_loco, (65, 64), "k must be 1 to 64, not 65"),
        (codecs.sparse_loco, (1, 0), "block must be 1 to 16777216, not 0"),
        (codecs.int8, ("column",), "per must be tensor, row or a block's size"),
        *((codecs.int8, (per,), "per must be") for per in (0, True)),
        (codecs.pack_ids, (2**31 + 1,), "vocab_size must be 1 to 2147483648"),
        (codecs.hadamard, (0,), "block must be 1 to 4096, not 0"),
        (codecs.hadamard, (256, 1.5), "seed must be"),
        (codecs.pack_tokens, ("mask", 65), "capacities must be 1 to 64, not 65"),
        (codecs.error_feedback, (codecs.fp16(), 1.5), "^beta must be"),
        (codecs.error_feedback, ("fp16",), "codec must be a codec such as fp16"),
        (codecs.from_step, (0, codecs.fp16()), "n must be an integer of at least 1"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_told(make, arguments, words):
    with pytest.raises(ValueError, match=words):
        make(*arguments)


NESTED = "from_step(9, " * 8 + "fp16" + ")" * 8


@pytest.mark.parametrize(
    ("string", "problem", "caret"),
    [
        ("svd(0.6)|fp15", "unknown codec fp15; did you mean fp16?", "fp15"),
        ("qqq", "unknown codec qqq; known: bf16, e3m0, ", "qqq"),
        ("svd(0.6", "'(' was never closed", "(0.6"),
        ("svd(0.6)fp16", "unexpected fp16", "fp16"),
        ("svd(0.6)|", "unexpected end", ""),
        ("|fp16", "unexpected |", "|fp16"),
        ("0.6", "expected a codec, not 0.6", "0.6"),
        ("svd(,)", "unexpected ,", ",)"),
        ("svd()", "argument ratio is missing: svd(ratio, flatten=false", "svd()"),
        ("svd(0.6, flat=true)", "no argument flat: svd(ratio, flatten=false", "flat="),
        ("fp16(3)", "too many arguments: fp16()", "3)"),
        ("svd(0.6, ratio=0.5)", "ratio is given twice: svd(", "ratio=0.5"),
        ("fp16|svd(1.5)", "svd: ratio must be above 0 and at most 1", "1.5)"),
        ("int8(column)", "int8: per must be tensor, row or a block's size", "column"),
        ("error_feedback(row)", "codec must be a codec such as fp16, not 'row'", "row"),
        ("error_feedback(rwo|fp16)", "unknown codec rwo; known: ", "rwo"),
        ("fp16|pack_tokens", "must be the first of its chain", "pack_tokens"),
        ("zstd|fp16", "must be the last of its chain", "fp16"),
        ("svd(0.6)é", "unexpected 'é'", "é"),
        ("fp16|zstd(20)", "zstd: level must be 1 to 19, not 20", "20)"),
        ("svd(1e999)", "svd: ratio must be above 0 and at most 1, not inf", "1e999"),
        (f"svd(0.{'1' * 30})", "more than 20 digits", "0.1"),
        (NESTED, "more than 8 codecs in codecs", "fp16"),
        (" fp16 \t|\r fp15", "unknown codec fp15", "fp15"),
        ("fp16.dtype", "expected a codec, not fp16.dtype", "fp16.dtype"),
        ("fp16()()", "expected a codec, not fp16()()", "fp16()()"),
        ("svd(0.6) + fp16", "expected a codec, not svd(0.6) + fp16", "svd"),
        ("svd(0.5 if 1 else 2)", "expected a codec, not 0.5 if 1 else 2", "0.5"),
        ("svd((0.5, 0.6))", "expected a codec, not (0.5, 0.6)", "(0.5, 0.6)"),
        ("svd(1j)", "expected a number, a word or a codec, not 1j", "1j"),
        ("svd(None)", "expected a number, a word or a codec, not None", "None"),
        ("(ratio := 0.6)", "unexpected ':'", ":"),
        ("f'{1}'", 'unexpected "\'"', "'{"),
        ("svd(*ratios)", "unexpected '*'", "*"),
        ("fp16 # fp16", "unexpected '#'", "#"),
        ("svd(1if)", "invalid decimal literal", "1if"),
        ("lambda", "unexpected end", ""),
    ],
)
def test_what_is_wrong_is_shown_with_a_caret(string, problem, caret):
    with pytest.raises(errors.NebulaError) as caught:
        codecs.from_string(string)
    words, shown, mark = str(caught.value).split("\n")
    assert problem in words
    assert shown == "  " + string.replace("\t", "?").replace("\r", "?")
    position = string.rindex(caret) if caret else len(string)
    assert mark == "  " + " " * position + "^"


@pytest.mark.parametrize(
    "string",
    [
        *("(" * 499, "-" * 498 + "1", "f" + "()" * 240, "not " * 120 + "a"),
        *("fp16|" * 99 + "fp16", "a|(" * 120 + "b" + ")" * 120, "svd(" + "9" * 490),
        *("1" * 10**6, "\0", "\ud800", "fp16\n|fp16"),
    ],
)
def test_hostile_text_is_a_codec_or_an_error_and_shown_in_short(string):
    try:
        found = codecs.from_string(string)
    except codecs.CodecError as error:
        found = str(error)
    assert isinstance(found, codec_lib.Codec) or len(found) < 2000


PIECES = [*codecs.NAMES, *"|(),=.+-", "zstd", "0.6", "64", "row", "true", "ratio", "-1"]
PIECES += [" ", "é", "1e9", "lambda", "if", "None", "1j", "0x", "\n", "fp16|fp16"]


def is_codec_or_can_be_shown(text):
    try:
        found = codecs.from_string(text)
    except codecs.CodecError as error:
        return len(str(error).split("\n")) == 3
    return isinstance(found, selector.Selector | codec_lib.Codec)


@hypothesis.settings(max_examples=50)
@hypothesis.given(
    st.text()
    | st.text(alphabet="(){}[]fp16sv|,=.+-* \t\n'#:@0")
    | st.lists(st.sampled_from(PIECES)).map("".join)
)
def test_any_text_is_a_codec_or_an_error_that_can_be_shown(text):
    assert is_codec_or_can_be_shown(text)


def calls(arguments):
    names = st.sampled_from([*codecs.NAMES, "zstd", "row", "fp15"])
    call = st.tuples(names, st.lists(arguments, max_size=3)).map(
        lambda each: f"{each[0]}({','.join(each[1])})"
    )
    return st.lists(call | names, min_size=1, max_size=3).map("|".join)


VALUES = st.sampled_from(["1", "0.5", "-3", "row", "true", "ratio=0.5", "seed=2", "9"])


@hypothesis.given(st.recursive(VALUES, calls, max_leaves=12))
def test_any_call_of_anything_is_a_codec_or_an_error_that_can_be_shown(text):
    """Constructors are given all sorts of values, and other codecs."""
    assert is_codec_or_can_be_shown(text)
