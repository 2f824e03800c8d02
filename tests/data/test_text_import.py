"""Rows of other formats: their places and their values, whatever these are."""

import gzip
import json

import pyarrow
import pytest
import tensorflow_datasets as tfds
from pyarrow import parquet

from nebula_jax.data import text_import, tsv

RECORDS = [{"de": "eins", "fr": "un"}, {"de": None, "fr": "deux"}]
ROWS = [["eins", "un"], [None, "deux"]]


def read(*inputs, languages=("de", "fr"), **more):
    return list(text_import.read(list(map(str, inputs)), languages, **more))


def values(*inputs, **more):
    return [each for _, each in read(*inputs, **more)]


def test_plain_files_follow_one_another(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\n\xff\n")
    (tmp_path / "b.gz").write_bytes(gzip.compress(b"three"))
    found = read(tmp_path / "a.txt", tmp_path / "b.gz", languages=["en"])
    assert found == [
        (f"{tmp_path}/a.txt:1", [b"one\n"]),
        (f"{tmp_path}/a.txt:2", [b"\xff\n"]),
        (f"{tmp_path}/b.gz:1", [b"three"]),
    ]


def test_two_files_of_a_pair_are_aligned_by_lines(tmp_path):
    (tmp_path / "c.de").write_text("eins\n\nzwei\n")
    (tmp_path / "c.fr").write_text("un\n\ndeux")
    found = read(tmp_path / "c.de", tmp_path / "c.fr")
    assert found[0] == (f"{tmp_path}/c.de:1", [b"eins\n", b"un\n"])
    assert found[2][1] == [b"zwei\n", b"deux"]


@pytest.mark.parametrize("longer", ["de", "fr"])
def test_files_of_a_pair_that_differ_in_their_lines_are_refused(tmp_path, longer):
    """Where a line is missing nobody knows: any pair might be a wrong one."""
    for name in ("de", "fr"):
        (tmp_path / f"c.{name}").write_text("x\n" * (5 if name == longer else 2))
    words = rf"c.{longer} has 5 lines, .*c\.\w\w has 2: from where"
    with pytest.raises(tsv.CorpusError, match=words):
        read(tmp_path / "c.de", tmp_path / "c.fr")


def write_json(folder):
    lines = [*map(json.dumps, RECORDS), "[1]", "{"]
    (folder / "a.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    return folder / "a.jsonl.gz"


def write_parquet(folder):
    (folder / "data").mkdir()
    table = pyarrow.Table.from_pylist(RECORDS)
    parquet.write_table(table, folder / "data" / "train-00000-of-00001.parquet")
    other = pyarrow.Table.from_pylist([{"de": "x", "fr": "y"}])
    parquet.write_table(other, folder / "data" / "validation-00000-of-00001.parquet")
    return folder


def write_arrow(path, records=RECORDS):
    table = pyarrow.Table.from_pylist(records)
    with (
        pyarrow.OSFile(str(path), "wb") as sink,
        pyarrow.ipc.new_stream(sink, table.schema) as writer,
    ):
        writer.write_table(table)


def write_saved(folder):
    """Files as `DatasetDict.save_to_disk` of `datasets` 4 writes them."""
    (folder / "dataset_dict.json").write_text('{"splits": ["train"]}')
    (folder / "train").mkdir()
    name = "data-00000-of-00001.arrow"
    write_arrow(folder / "train" / name)
    state = {"_data_files": [{"filename": name}], "_split": "train"}
    (folder / "train" / "state.json").write_text(json.dumps(state))
    return folder


class Pairs(tfds.core.GeneratorBasedBuilder):
    """A dataset of TFDS."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        text = tfds.features.Text()
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict({"de": text, "fr": text}),
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager):
        del dl_manager
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        yield from enumerate([RECORDS[0], {"de": "", "fr": "deux"}])


def write_tfds(folder):
    builder = Pairs(data_dir=str(folder), file_format="array_record")
    none = tfds.download.DownloadConfig(try_download_gcs=False)
    builder.download_and_prepare(download_config=none)
    return builder.data_path


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (write_json, [*ROWS, None, None]),
        (write_parquet, ROWS),
        (write_saved, ROWS),
        (write_tfds, [[b"eins", b"un"], [b"", b"deux"]]),
    ],
)
def test_a_format_with_columns_gives_those_of_the_languages(tmp_path, write, expected):
    path = write(tmp_path)
    assert values(path) == expected
    assert values(path, languages=["fr"]) == [each and each[1:] for each in expected]
    assert read(path)[1][0].endswith(":2")


def test_a_file_of_the_cache_of_datasets_is_read(tmp_path):
    write_arrow(tmp_path / "opus-train.arrow", [{"translation": RECORDS[0]}])
    assert values(tmp_path) == [["eins", "un"]]
    assert values(tmp_path / "opus-train.arrow") == [["eins", "un"]]
    columns = ["translation.fr", "translation.de"]
    assert values(tmp_path, columns=columns) == [["un", "eins"]]


def test_another_split_is_chosen_by_name(tmp_path):
    assert values(write_parquet(tmp_path), split="validation") == [["x", "y"]]


@pytest.mark.parametrize(
    ("write", "more", "words"),
    [
        (write_parquet, {"split": "test"}, r"no split test \(from_split\)"),
        (write_saved, {"split": "test"}, r"no split test \(from_split\); there is tr"),
        (write_tfds, {"split": "test"}, r"TFDS cannot read split test of it"),
        (write_json, {"languages": ["en"]}, "no column en; name the .* of de, fr"),
        (write_json, {"columns": ["de"]}, "columns=de: expected one for each of lang"),
        (write_json, {"columns": ["de", "x"]}, "no column de, x; name the"),
        (lambda folder: folder / "nothing.jsonl", {}, "no such file or folder"),
        (lambda folder: folder / "nothing.txt", {}, "comes in twos"),
        (lambda folder: folder / "nothing.txt", {"languages": ["de"]}, "no such file"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, write, more, words):
    with pytest.raises(tsv.NoCorpusError, match=words):
        read(write(tmp_path), **more)


@pytest.mark.parametrize("name", ["a.csv", "a.tsv.gz", "a.json", "a.zst"])
def test_another_format_is_no_plain_text(tmp_path, name):
    (tmp_path / name).write_text("de\tfr\n")
    with pytest.raises(tsv.NoCorpusError, match=rf"{name}: no format"):
        read(tmp_path / name, languages=["de"])


def test_configurations_of_a_dataset_are_not_mixed(tmp_path):
    for language in ("de", "fr"):
        (tmp_path / f"2023.{language}").mkdir()
        write_parquet(tmp_path / f"2023.{language}")
    with pytest.raises(tsv.NoCorpusError, match=r"is in 2023\.de/data, 2023"):
        read(tmp_path)
    assert read(tmp_path / "2023.de")


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_a_damaged_description_is_named(tmp_path, text):
    write_saved(tmp_path)
    (tmp_path / "train" / "state.json").write_text(text)
    with pytest.raises(tsv.CorpusError, match=r"state\.json: malformed"):
        read(tmp_path)


def test_rows_that_indices_choose_are_not_read_as_all_rows(tmp_path):
    write_saved(tmp_path)
    state = {"_data_files": [], "_indices_data_files": [{"filename": "i.arrow"}]}
    (tmp_path / "train" / "state.json").write_text(json.dumps(state))
    with pytest.raises(tsv.CorpusError, match=r"save it again after flatten_indices"):
        read(tmp_path)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.txt.gz"])
def test_a_damaged_file_is_named(tmp_path, name):
    (tmp_path / name).write_bytes(b"damaged" * 9)
    with pytest.raises(tsv.CorpusError, match=rf"{name}: cannot be read after"):
        read(tmp_path / name, languages=["de"])
