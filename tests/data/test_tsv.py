import gzip

import pytest

from nebula_jax.data import tsv


def write(path, *lines):
    text = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def rows(path, columns=("id", "text"), **options):
    return list(tsv.rows(path, columns, **options))


@pytest.mark.parametrize("name", ["a.tsv", "a.tsv.gz"])
def test_the_wanted_columns_come_in_the_wanted_order(tmp_path, name):
    path = write(tmp_path / name, "text\tmore\tid", "eins\tx\ta", "zwei\ty\tb\r")
    assert rows(path) == [(2, ["a", "eins"]), (3, ["b", "zwei"])]
    assert tsv.header(path) == ["text", "more", "id"]
    assert tsv.plain_or_gzip(tmp_path / "a.tsv") == path
    assert tsv.plain_or_gzip(tmp_path / "b.tsv") is None


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"one\r\ntwo\rthree\n\r\r\nlast", ["one", "two\rthree", "\r", "last"]),
        (b"a\tb\reins\rzwei\r", ["a\tb", "eins", "zwei"]),
        (b"one\r\rthree\nfour", ["one", "", "three", "four"]),  # with another editor
    ],
)
def test_a_lone_cr_is_text_unless_the_first_line_ends_with_one(
    tmp_path, content, lines
):
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    assert [line for _, line in tsv.lines(path)] == lines


def test_a_byte_order_mark_is_no_text(tmp_path):
    path = write(tmp_path / "a.tsv", "\ufeffid\ttext", "a\teins", "\ufeffb\tz\ufeffwei")
    assert rows(path) == [(2, ["a", "eins"]), (3, ["b", "z\ufeffwei"])]
    assert tsv.header(path) == ["id", "text"]


@pytest.mark.parametrize(
    ("lines", "options", "words"),
    [
        (["id"], {}, ":1: the header has no column 'text'; expected id<TAB>text"),
        (["text\tid"], {"exact": True}, "columns in another order; .* nothing else"),
        (["id\ttext\tx"], {"exact": True}, "the header has 3 columns"),
        (["id\ttext\tid"], {}, "the header has more than one column 'id'; expected"),
        (["id\ttext"], {}, "has no rows below its header"),
        (["id\ttext", "a"], {}, ":2: 1 tab-separated fields; expected 2"),
        (["id\ttext", 'a"'], {}, "expected 2; a quotation mark is text here"),
        (["id\ttext", "a\t "], {}, ":2: text is empty"),
        (["id\ttext", "a\tb\0"], {}, r":2: control character U\+0000 in text"),
        (["id\ttext", "a\tb", "a\tc"], {"unique": "id"}, ":3: id 'a' is in line 2 alr"),
        (["id\ttext", "a\tb\u2028"], {"forbidden": tsv.CONTROL}, r"character U\+2028"),
    ],
)
def test_what_is_malformed_is_named_with_file_and_line(tmp_path, lines, options, words):
    path = write(tmp_path / "a.tsv", *lines)
    with pytest.raises(tsv.CorpusError, match=rf"a\.tsv:? ?.*{words}"):
        rows(path, **options)


def test_a_column_may_be_empty_and_others_are_not_looked_at(tmp_path):
    path = write(
        tmp_path / "a.tsv", "id\tgenre\ttext\tmore", "a\t\teins\t\0", "a\t \tb\t"
    )
    wanted = ("id", "genre", "text")
    found = rows(path, wanted, may_be_empty=("genre",))
    assert found == [(2, ["a", "", "eins"]), (3, ["a", " ", "b"])]
