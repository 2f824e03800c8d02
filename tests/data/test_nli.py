import gzip
import pathlib
from unittest import mock

import numpy as np
import pytest
import tensorflow_datasets as tfds
import tiny_nli

from nebula_jax.data import nli, nli_tfds, text_folder

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


def test_a_gzipped_file_is_the_same(tmp_path):
    path = write(tmp_path, GOOD)
    zipped = path.with_name("test.de.tsv.gz")
    zipped.write_bytes(gzip.compress(path.read_bytes()))
    assert nli.path(tmp_path, "test", "de") == zipped
    assert nli.read(zipped)[:3] == nli.read(path)[:3]


def test_quotation_marks_are_text_wherever_they_stand(tmp_path):
    """CSV quoting would join the first two lines and unwrap the third."""
    lines = [
        'q-1\t-\t"and then\the left\tneutral',
        'q-2\t-\tshe stayed"\t"\tneutral',
        'q-3\t-\t"a ""b"" c"\tsaid " she\tneutral',
    ]
    found = nli.read(write(tmp_path, *lines))
    assert found.premises == ['"and then', 'she stayed"', '"a ""b"" c"']
    assert found.hypotheses == ["he left", '"', 'said " she']


@pytest.mark.parametrize(
    ("header", "lines", "words"),
    [
        ("id\tgenre\tpremise\tlabel", [], ":1: the header has no column 'hypothesis'"),
        (
            "premise\tid\tgenre\thypothesis\tlabel",
            [],
            ":1: the header has its columns in another order",
        ),
        (tiny_nli.HEADER + "\tmore", [], "nothing else"),
        ('"id"\tgenre\tpremise\thypothesis\tlabel', [], "quotes no tab or line break"),
        (tiny_nli.HEADER, [], "has no rows below its header"),
        (tiny_nli.HEADER, [GOOD, "a\t-\tb\tc"], ":3: 4 tab-separated fields"),
        (
            tiny_nli.HEADER,
            ['a\t-\t"b', 'c"\td\tneutral'],
            ":2: 3 tab-separated fields; expected 5; a quotation mark is text",
        ),
        (tiny_nli.HEADER, [GOOD.replace("ent", "Ent", 1)], "label 'Entailment'; exp"),
        (tiny_nli.HEADER, ["a\t-\tb\tc\t-"], ":2: unknown label '-'"),
        (tiny_nli.HEADER, ['a\t-\tb\tc\t"neutral"'], "a quotation mark is text"),
        (tiny_nli.HEADER, ["a\t-\tb\t \tneutral"], ":2: hypothesis is empty"),
        (tiny_nli.HEADER, ["\t-\tb\tc\tneutral"], ":2: id is empty"),
        (tiny_nli.HEADER, [GOOD, GOOD], ":3: id 'a-1' is in line 2 already"),
        (
            tiny_nli.HEADER,
            ["a\t-\tb\0\tc\tneutral"],
            ":2: control character U+0000 in premise",
        ),
    ],
)
def test_what_is_malformed_is_named_with_file_and_line(tmp_path, header, lines, words):
    path = write(tmp_path, *lines, header=header)
    with pytest.raises(text_folder.CorpusError) as error:
        nli.read(path)
    assert words in str(error.value)
    assert str(path) in str(error.value)


def test_other_bytes_than_utf8_are_an_error(tmp_path):
    path = write(tmp_path, GOOD)
    path.write_bytes(path.read_bytes() + b"\xff\n")
    with pytest.raises(text_folder.CorpusError, match=r":3: not UTF-8"):
        nli.read(path)


def test_languages_without_a_file_are_known(tmp_path):
    write(tmp_path, GOOD)
    assert nli.present(tmp_path, "test", ["sw", "en"]) == (["en"], ["sw"])
    with pytest.raises(text_folder.CorpusError, match="'sw' has no test pairs"):
        nli.path(tmp_path, "test", "sw")
    with pytest.raises(text_folder.CorpusError, match="no dev pairs in it"):
        nli.present(tmp_path, "dev", ["sw", "en"])
    with pytest.raises(text_folder.CorpusError, match="there is no such folder"):
        nli.present(tmp_path / "nowhere", "dev", ["en"])


LANGUAGES = ("en", "sw")


def read(tmp_path, split="dev"):
    return nli_tfds.read(
        split,
        LANGUAGES,
        data_dir=tmp_path / "text",
        tfds_dir=tmp_path / "tfds",
    )


def present(tmp_path, *languages):
    folders = {"data_dir": tmp_path / "text", "tfds_dir": tmp_path / "tfds"}
    return nli_tfds.present("dev", languages, **folders)


def test_the_folder_is_read_if_nothing_of_tfds_is_prepared(tmp_path):
    text = tiny_nli.write_text(tmp_path / "text")
    for split in ("dev", "test"):
        found, where = read(tmp_path, split)
        assert where == str(text)
        for language in LANGUAGES:
            want = nli.read(nli.path(text, split, language))
            assert found[language][:3] == want[:3]
            np.testing.assert_array_equal(found[language].labels, want.labels)


def test_tfdss_own_builder_is_used_where_it_is_prepared(tmp_path):
    """It reads XNLI's own files; the same pairs come, though in another order."""
    tiny_nli.write_text(tmp_path / "text")
    ours, _ = read(tmp_path)
    assert present(tmp_path, "en", "ur") == (["en"], ["ur"])
    prepare_theirs(tmp_path)
    assert present(tmp_path, "en", "ur", "xx") == (["en", "ur"], ["xx"])
    with pytest.raises(text_folder.CorpusError, match="xnli has no xx"):
        present(tmp_path, "xx")
    theirs, where = read(tmp_path)
    assert "TFDS's xnli" in where
    for language in LANGUAGES:
        assert as_set(theirs[language]) == as_set(ours[language])
        # A pair has one place in all languages.
        assert theirs[language].ids == theirs["en"].ids
        # In another order, and so not under the ids that the folder's pairs have.
        assert not set(theirs[language].ids) & set(ours[language].ids)
        assert all(name.startswith("tfds-xnli-") for name in theirs[language].ids)


def as_set(examples):
    """The pairs with their labels, sorted."""
    labels = examples.labels.tolist()
    return sorted(zip(examples.premises, examples.hypotheses, labels, strict=True))


def prepare_theirs(tmp_path):
    """Runs TFDS's builder of xnli on files as XNLI-1.0.zip has them, not downloaded."""
    from tensorflow_datasets.text import xnli

    folder = tmp_path / "downloaded" / "XNLI-1.0"
    folder.mkdir(parents=True)
    for split in ("dev", "test"):
        rows = ["language\tgold_label\tsentence1\tsentence2\tpairID"]
        for language in xnli._LANGUAGES:
            known = language if language in tiny_nli.FORMS else "en"
            for line in tiny_nli.lines(split, known)[1:]:
                name, _, premise, hypothesis, label = line.split("\t")
                rows.append(f"{language}\t{label}\t{premise}\t{hypothesis}\t{name}")
        (folder / f"xnli.{split}.tsv").write_text("\n".join(rows) + "\n")
    with mock.patch("tempfile.tempdir", str(tmp_path)):  # it leaves a folder there
        builder = xnli.Xnli(data_dir=str(tmp_path / "tfds"), file_format="array_record")
    no_download = mock.patch.object(
        tfds.download.DownloadManager,
        "download_and_extract",
        return_value=str(folder.parent),
    )
    tfds.disable_progress_bar()
    with no_download:
        builder.download_and_prepare(
            download_config=tfds.download.DownloadConfig(try_download_gcs=False)
        )


def test_a_damaged_dataset_of_tfds_is_one_error(tmp_path):
    tiny_nli.write_text(tmp_path / "text")
    prepare_theirs(tmp_path)
    folder = pathlib.Path(tmp_path / "tfds")
    for pattern in ("*.array_record*", "features.json"):
        (*_, path) = paths = sorted(folder.rglob(pattern))
        for path in paths:
            path.write_bytes(b"nothing")
        with pytest.raises(text_folder.CorpusError, match="cannot be read with TFDS"):
            read(tmp_path)
    with pytest.raises(text_folder.CorpusError, match="cannot be read with TFDS"):
        present(tmp_path, "en")
