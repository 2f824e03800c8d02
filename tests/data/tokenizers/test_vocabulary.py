import pytest
import sentencepiece

from nebula_jax.data.tokenizers import vocabulary as vocabularies

LINES = [f"the number {n} is written {n * 7} and {n * 13}" for n in range(300)]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocab") / "v.model"
    vocabularies.train(LINES, 120, path)
    return path


def processor(path):
    """The library's own view of the file."""
    return sentencepiece.SentencePieceProcessor(model_file=str(path))


def test_a_vocabulary_encodes_and_decodes_text(path):
    loaded = vocabularies.load(path)
    ids = loaded.encode(LINES[42])
    assert min(ids) >= vocabularies.NUM_SPECIAL
    assert max(ids) < loaded.size <= 120
    assert processor(path).decode(ids) == LINES[42]
    assert "".join(map(loaded.piece, ids)).replace("▁", " ").strip() == LINES[42]


def test_control_pieces_come_first_and_are_never_text(path):
    loaded = vocabularies.load(path)
    pieces = [processor(path).id_to_piece(i) for i in range(vocabularies.NUM_SPECIAL)]
    assert pieces == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert vocabularies.SPECIAL.mask not in loaded.encode("a [MASK] in text")


def test_the_same_text_gives_the_same_digest(path, tmp_path):
    vocabularies.train(LINES, 120, tmp_path / "again.model")
    assert (
        vocabularies.load(tmp_path / "again.model").digest
        == vocabularies.load(path).digest
    )


def test_unusable_files_are_named(tmp_path):
    with pytest.raises(vocabularies.VocabularyError, match="No such file"):
        vocabularies.load(tmp_path / "none.model")
    (tmp_path / "garbage.model").write_bytes(b"garbage")
    with pytest.raises(vocabularies.VocabularyError, match="not a sentencepiece model"):
        vocabularies.load(tmp_path / "garbage.model")


def test_long_lines_are_cut_and_not_left_out(tmp_path):
    line = "".join(chr(0x4E00 + n % 60) for n in range(1500))
    assert len(line.encode()) > vocabularies.MAX_SENTENCE_BYTES
    assert "".join(vocabularies.cut(line)) == line
    vocabularies.train([*LINES, *[line] * 20], 200, tmp_path / "v.model")
    found = vocabularies.load(tmp_path / "v.model").encode(line)
    assert vocabularies.SPECIAL.unk not in found


def test_the_reason_is_no_assertion_of_sentencepieces(tmp_path):
    for lines, words in (["\u200b"] * 9, "too little"), (LINES, "alone need [0-9]+$"):
        with pytest.raises(vocabularies.VocabularyError, match=words) as caught:
            vocabularies.train(lines, 10, tmp_path / "v.model")
        assert ".cc" not in str(caught.value)
