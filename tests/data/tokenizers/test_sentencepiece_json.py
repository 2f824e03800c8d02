"""What transformers reads of a vocabulary of ours cuts text as sentencepiece does."""

import json
import pathlib
import shutil

import pytest
import sentencepiece
import tokenizers as hf_tokenizers

from nebula_jax.data import ragged_rows, tokenizers
from nebula_jax.data.tokenizers import vocabulary as vocabularies

GOLDENS = pathlib.Path(__file__).parent / "goldens"
TEXTS = json.loads((GOLDENS / "tokenizers.json").read_text("utf-8"))["texts"]
ODD = [
    "  two  spaces,\tand a tab ",
    "ｆｕｌｌ ｗｉｄｔｈ ﬁne ½",  # NFKC makes other characters of them
    "unknown: \u2603 \U0001f600 a\u0301",
    "a\u00a0b\u200bc",
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a vocabulary of ours and what transformers reads; its tokenizer."""
    folder = tmp_path_factory.mktemp("vocabulary")
    lines = [f"{text} {n} times" for n in range(60) for text in TEXTS[:-1]]
    (folder / "new").mkdir()
    vocabularies.train(lines, 300, folder / "new" / "spiece.model")
    tokenizer = tokenizers.load(folder / "new")
    tokenizers.save(folder / "saved", tokenizer, max_length=16)
    return folder / "saved", tokenizer


def test_ids_and_text_are_those_of_sentencepiece(saved):
    folder, tokenizer = saved
    theirs = hf_tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in [*TEXTS, *ODD]:
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ids == tokenizer.encode(text), text
    assert theirs.decode(tokenizer.encode(TEXTS[0])) == TEXTS[0]
    assert theirs.token_to_id("[MASK]") == tokenizer.special.mask
    assert theirs.get_vocab_size() == tokenizer.size


def test_a_pair_has_the_separators_that_it_is_trained_with(saved):
    folder, tokenizer = saved
    theirs = hf_tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for types in (0, 1):
        assert ragged_rows.has_double_separator(tokenizer, types)
    one, two = TEXTS[:2]
    rows = ragged_rows.tokenize_pairs(["1"], [one], [two], tokenizer, 99, separators=2)
    encoding = theirs.encode(one, two)
    assert encoding.ids == rows.rows([0], rows.lengths[0], 0)[0].tolist()
    assert set(encoding.type_ids) == {0}


def test_our_own_runs_go_on_reading_sentencepieces_file(saved, tmp_path):
    """Its ids are those that the encoder was trained with, in every odd text."""
    folder, tokenizer = shutil.copytree(saved[0], tmp_path / "copy"), saved[1]
    config = folder / "tokenizer_config.json"
    assert json.loads(config.read_text())["model_max_length"] == 16
    (folder / "tokenizer.json").write_text("damaged")
    again = tokenizers.load(folder)
    assert again.library.pieces == tokenizer.library.pieces
    assert again.encode_batch(ODD) == tokenizer.encode_batch(ODD)
    assert tokenizer.special.mask not in again.encode("a [MASK] in text")


def test_a_model_of_merges_gets_no_file_that_would_cut_otherwise(tmp_path):
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 40),
        model_prefix=str(tmp_path / "spiece"),
        model_type="bpe",
        vocab_size=250,
        hard_vocab_limit=False,
        pad_id=0,
        unk_id=1,
        bos_id=2,
        eos_id=3,
        pad_piece="[PAD]",
        unk_piece="[UNK]",
        bos_piece="[CLS]",
        eos_piece="[SEP]",
        control_symbols=["[MASK]"],
    )
    tokenizers.save(tmp_path / "saved", tokenizers.load(tmp_path))
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["spiece.model"]
