import gzip

import pytest

from nebula_jax.data import parallel_side, tsv


def write(path, content):
    data = content.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("ending", [".tsv", ".tsv.gz"])
def test_examples_are_read_in_the_order_of_their_ids(tmp_path, ending):
    file = write(tmp_path / f"train{ending}", "id\ttext\nb\tzwei\na\teins\n")
    assert parallel_side.path(tmp_path, "train") == file
    assert parallel_side.read(file) == parallel_side.Side(["a", "b"], ["eins", "zwei"])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("id\ttext\ten\n", r":1: the header has 3 columns; .* nothing else"),
        ("id\ttext\na\teins\na b\tzwei\n", r":3: an id is"),
        ("id\ttext\na\teins\né\tzwei\n", r":3: an id is"),
        ("id\ttext\na\teins\nb\tzwei\na\tdrei\n", r":4: id 'a' is in line 2 already"),
        ("id\ttext\na\tei\rns\n", r":2: control character U\+000D in text"),
    ],
)
def test_a_malformed_side_is_named_with_file_and_line(tmp_path, content, words):
    with pytest.raises(tsv.CorpusError, match=rf"train\.tsv:? ?.*{words}") as error:
        parallel_side.read(write(tmp_path / "train.tsv", content))
    assert not any(word in str(error.value) for word in ("eins", "zwei", "drei"))


def test_a_missing_split_is_named(tmp_path):
    for split in ("train", "test"):
        write(tmp_path / f"{split}.tsv", "id\ttext\na\teins\n")
    with pytest.raises(tsv.CorpusError, match=r"dev\.tsv\.gz is missing"):
        parallel_side.splits(tmp_path)
