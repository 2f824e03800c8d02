import numpy as np
import pytest
import tiny_nli

from nebula_jax.data import nli, text_folder

GOOD = "a-1\tfiction\tit rains\tit is wet\tentailment"


def write(tmp_path, *lines, header=tiny_nli.HEADER, name="test.en.tsv"):
    path = tmp_path / "nli" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in (header, *lines)))
    return path


def test_a_file_is_read_in_its_order(tmp_path):
    more = "a-0\t-\tit snows\tit is hot\tcontradiction"
    ids, premises, hypotheses, labels = nli.read(write(tmp_path, GOOD, more))
    assert ids == ["a-1", "a-0"]
    assert premises == ["it rains", "it snows"]
    assert hypotheses == ["it is wet", "it is hot"]
    np.testing.assert_array_equal(labels, [0, 2])
    assert labels.dtype == np.int32
    assert nli.histogram(labels) == {"entailment": 1, "neutral": 0, "contradiction": 1}


def test_quotation_marks_are_text_wherever_they_stand(tmp_path):
    """CSV quoting would join the first two lines and unwrap the third."""
    pairs = [('"and then', "he left"), ('she stayed"', '"'), ('"a ""b"" c"', 'b " c')]
    lines = [f"q-{n}\t-\t{one}\t{two}\tneutral" for n, (one, two) in enumerate(pairs)]
    found = nli.read(write(tmp_path, *lines))
    assert [*zip(found.premises, found.hypotheses, strict=True)] == pairs


@pytest.mark.parametrize(
    ("header", "lines", "words"),
    [
        ("premise\tid\tgenre\thypothesis\tlabel", [], "columns in another order"),
        (tiny_nli.HEADER, ["a\t-\tb\tc\t-"], ":2: unknown label '-'; expected ent"),
        (tiny_nli.HEADER, ['a\t-\tb\tc\t"neutral"'], "a quotation mark is text"),
        (tiny_nli.HEADER, ["a\t-\tb\t \tneutral"], ":2: hypothesis is empty"),
        (tiny_nli.HEADER, [GOOD, GOOD], ":3: id 'a-1' is in line 2 already"),
    ],
)
def test_what_is_malformed_is_named_with_file_and_line(tmp_path, header, lines, words):
    path = write(tmp_path, *lines, header=header)
    with pytest.raises(text_folder.CorpusError) as error:
        nli.read(path)
    assert words in str(error.value)
    assert str(path) in str(error.value)


def test_languages_without_a_file_are_named(tmp_path):
    path = write(tmp_path, GOOD, name="test.en.tsv.gz")  # which is not opened
    assert nli.paths(tmp_path, "test", ["en"]) == {"en": path}
    with pytest.raises(text_folder.CorpusError, match="no test pairs in sw;"):
        nli.paths(tmp_path, "test", ["sw", "en"])
    with pytest.raises(text_folder.CorpusError, match="there is no such folder"):
        nli.paths(tmp_path / "nowhere", "dev", ["en"])
