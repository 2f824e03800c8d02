import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers as hf_tokenizers
from tokenizers import decoders, models, pre_tokenizers

from nebula_jax.data import tokenizers

GOLDENS = pathlib.Path(__file__).parent / "goldens"
GOLDEN = json.loads((GOLDENS / "tokenizers.json").read_text("utf-8"))

SENTENCEPIECE = {"sentencepiece.bpe.model": "sentencepiece.bpe.model"}
# Golden name -> files of the folder, tokenizer_config.json.
KINDS = {
    "bert_uncased": ({"bert_vocab.txt": "vocab.txt"}, {"do_lower_case": True}),
    "bert_cased": ({"bert_vocab.txt": "vocab.txt"}, {"do_lower_case": False}),
    "xlm_r": (SENTENCEPIECE, {}),
    "ernie_m": (SENTENCEPIECE | {"ernie_m_vocab.txt": "vocab.txt"}, {}),
}


def write(folder, kind):
    if kind == "json":
        return write_json(folder)
    files, settings = KINDS[kind]
    folder.mkdir(exist_ok=True)
    for source, target in files.items():
        shutil.copy(GOLDENS / source, folder / target)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def write_json(folder):
    """A tokenizer.json of XLM-R's kind, that cuts and pads as all-MiniLM's does."""
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "▁a", "▁", "b", "c", "<mask>"]
    scores = [(piece, -float(number)) for number, piece in enumerate(pieces)]
    made = hf_tokenizers.Tokenizer(models.Unigram(scores, unk_id=3))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    made.enable_truncation(2)
    made.enable_padding(length=4, pad_id=1, pad_token="<pad>")
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_transformers_and_texts_come_back(kind, tmp_path):
    golden = GOLDEN[kind]
    tokenizer = tokenizers.load(write(tmp_path / kind, kind))
    assert tokenizer.encode_batch(GOLDEN["texts"]) == golden["ids"]
    assert [tokenizer.encode(text) for text in GOLDEN["texts"]] == golden["ids"]
    assert list(tokenizer.special.ids) == golden["special"]
    assert tokenizer.size == golden["size"]
    for text in GOLDEN["texts"][0], GOLDEN["texts"][3]:
        expected = text.lower() if kind == "bert_uncased" else text
        ids = [
            tokenizer.special.cls,
            *tokenizer.encode(text),
            tokenizer.special.sep,
            tokenizer.special.pad,
        ]
        assert tokenizer.decode(ids) == expected
        assert tokenizer.decode(np.asarray(ids)) == expected


def test_a_json_file_neither_cuts_nor_pads(tmp_path):
    tokenizer = tokenizers.load(write(tmp_path / "json", "json"))
    ids = tokenizer.encode("a bcb a")
    assert [tokenizer.piece(i) for i in ids] == ["▁a", "▁", "b", "c", "b", "▁a"]
    assert tokenizer.decode(ids) == "a bcb a"
    assert tokenizer.special.ids == (1, 3, 0, 2, 8)


@pytest.mark.parametrize("kind", [*KINDS, "json"])
def test_special_pieces_are_never_text(kind, tmp_path):
    tokenizer = tokenizers.load(write(tmp_path / kind, kind))
    ids = tokenizer.encode("a <s> [SEP] <mask> [MASK] </s> <pad> [PAD] a")
    assert set(ids) & set(tokenizer.special.ids) <= {tokenizer.special.unk}


def test_the_digest_is_the_contents(tmp_path):
    first = tokenizers.load(write(tmp_path / "a", "bert_uncased"))
    assert tokenizers.load(write(tmp_path / "b", "bert_uncased")).digest == first.digest
    cased = tokenizers.load(write(tmp_path / "c", "bert_cased"))
    assert cased.digest != first.digest


@pytest.mark.parametrize("kind", [*KINDS, "json"])
def test_a_trimmed_tokenizer_renumbers_and_nothing_else(kind, tmp_path):
    whole = tokenizers.load(write(tmp_path / kind, kind))
    texts = ["a"] if kind == "json" else GOLDEN["texts"][:1]
    counts = tokenizers.count_pieces(whole, texts)
    assert counts.sum() == len(whole.encode(texts[0]))
    keep = tokenizers.kept_ids(whole, np.flatnonzero(counts))
    small = tokenizers.trim(whole, keep)
    assert small.size == len(keep) < whole.size
    assert small.digest != whole.digest
    assert [small.piece(i) for i in small.special.ids] == [
        whole.piece(i) for i in whole.special.ids
    ]
    ids = small.encode(texts[0])
    assert [keep[i] for i in ids] == whole.encode(texts[0])
    assert small.decode(ids) == whole.decode(whole.encode(texts[0]))

    other = "b" if kind == "json" else GOLDEN["texts"][3]
    expected = [i if i in keep else whole.special.unk for i in whole.encode(other)]
    assert [keep[i] for i in small.encode(other)] == expected
    assert small.special.unk in small.encode(other)


def test_special_tokens_are_recognized_in_numpy_and_jax():
    special = tokenizers.SpecialTokens(7, 1, 5, 3, 9, size=10)
    ids = np.arange(10).reshape(2, 5)
    expected = np.isin(ids, special.ids)
    np.testing.assert_array_equal(special.contains(ids), expected)
    found = special.contains(jnp.asarray(ids))
    assert isinstance(found, jax.Array)
    np.testing.assert_array_equal(found, expected)


def test_a_trimmed_tokenizer_is_saved_and_found_again(tmp_path):
    whole = tokenizers.load(write(tmp_path / "whole", "xlm_r"))
    once = tokenizers.trim(whole, range(40))
    tokenizers.save(tmp_path / "once", once)
    assert tokenizers.load(tmp_path / "once").digest == once.digest
    twice = tokenizers.trim(once, range(20))
    tokenizers.save(tmp_path / "twice", twice)
    again = tokenizers.load(tmp_path / "twice")
    np.testing.assert_array_equal(again.old_ids, twice.old_ids)
    assert again.special.ids == twice.special.ids
    text = GOLDEN["texts"][0]
    assert again.encode(text) == twice.encode(text)
    # Saving the whole one over it takes the trimming back.
    tokenizers.save(tmp_path / "twice", whole)
    assert tokenizers.load(tmp_path / "twice").digest == whole.digest


def test_a_vocabulary_of_another_editor_has_the_same_pieces(tmp_path):
    for kind in ("bert_cased", "ernie_m"):
        folder = write(tmp_path / kind, kind)
        expected = tokenizers.load(folder).library.pieces
        text = (folder / "vocab.txt").read_text("utf-8")
        changed = "\ufeff" + text.replace("\n", "\r\n")
        (folder / "vocab.txt").write_bytes(changed.encode())
        assert tokenizers.load(folder).library.pieces == expected


def test_unusable_folders_are_named(tmp_path):
    with pytest.raises(tokenizers.TokenizerError, match="has no tokenizer"):
        tokenizers.load(tmp_path)
    (tmp_path / "vocab.txt").write_text("only\nwords\n")
    with pytest.raises(tokenizers.TokenizerError, match=r"neither \[PAD\] \[UNK\]"):
        tokenizers.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(tokenizers.TokenizerError, match="is no JSON"):
        tokenizers.load(tmp_path)
    (tmp_path / "sentencepiece.bpe.model").write_bytes(b"garbage")
    with pytest.raises(tokenizers.TokenizerError, match=r"is no sentencepiece model$"):
        tokenizers.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(tokenizers.TokenizerError, match=r"\.json cannot be read"):
        tokenizers.load(tmp_path)


def test_what_is_kept_must_fit(tmp_path):
    folder = write(tmp_path / "a", "xlm_r")
    whole = tokenizers.load(folder)
    with pytest.raises(tokenizers.TokenizerError, match=r"must be in 0\.\.\.71"):
        tokenizers.trim(whole, [72])
    tokenizers.save(tmp_path / "b", tokenizers.trim(whole, range(40)))
    folder = tmp_path / "b"
    for damaged in ("{", "{}", '{"kept_ids": [5]}', '{"kept_ids": [0, 900]}'):
        (folder / "kept_pieces.json").write_text(damaged)
        with pytest.raises(tokenizers.TokenizerError, match="does not fit"):
            tokenizers.load(folder)
