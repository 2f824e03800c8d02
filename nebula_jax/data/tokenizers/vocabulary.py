"""The vocabulary that all clusters of an M3 run share: special tokens, then text.

It is a sentencepiece model trained here, or a pretrained model's tokenizer with its
pieces in another order. V pieces.
"""

import hashlib
import io
import pathlib
import re
import textwrap
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from nebula_jax import errors, files, installed
from nebula_jax.data import tokenizers

PIECES = tokenizers.SPECIAL_PIECES[0]  # special pieces, in the order of their ids
NUM_SPECIAL = len(PIECES)  # ids from here on are text; those below are never masked
SPECIAL = tokenizers.SpecialTokens._make([*range(NUM_SPECIAL), NUM_SPECIAL])
"""Their ids, in every vocabulary of this kind; `size` counts them alone."""

MAX_SENTENCE_BYTES = 4192  # sentencepiece's own default; it leaves longer lines out


class VocabularyError(errors.NebulaError):
    """A vocabulary file is missing, unreadable or of another kind."""


class Vocabulary(NamedTuple):
    """A loaded vocabulary."""

    path: pathlib.Path
    encode: Callable[[str], list[int]]  # text -> piece ids, none special but [UNK]
    size: int  # V
    digest: str  # SHA-256 of the content. Clusters compare it when they meet
    rows: np.ndarray | None = None
    """[V] int32, each piece's id in the pretrained model's own, untrimmed tokenizer (of
    an untrimmed table: its row); None for a vocabulary that was trained here."""
    piece: Callable[[int], str] = str  # as it is written, `▁` for a space before it


def train(lines: Iterable[str], size: int, path: pathlib.Path) -> int:
    """Trains a unigram vocabulary, as XLM-R's is; returns how many pieces it has.

    Of sentences, whose languages the caller balances; long ones are cut up. A small
    text may yield fewer than `size` pieces, special ones included. The model file is
    written whole or not at all. VocabularyError if there is too little text.
    """
    with installed.extra("experiments"):
        import sentencepiece
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(part for line in lines for part in cut(line)),
            model_writer=model,
            model_type="unigram",
            vocab_size=size,
            hard_vocab_limit=False,
            character_coverage=0.9995,
            pad_id=SPECIAL.pad,
            unk_id=SPECIAL.unk,
            bos_id=SPECIAL.cls,
            eos_id=SPECIAL.sep,
            pad_piece=PIECES[SPECIAL.pad],
            unk_piece=PIECES[SPECIAL.unk],
            bos_piece=PIECES[SPECIAL.cls],
            eos_piece=PIECES[SPECIAL.sep],
            control_symbols=[PIECES[SPECIAL.mask]],
            num_threads=2,
            max_sentence_length=MAX_SENTENCE_BYTES,
            minloglevel=2,
        )
    except (RuntimeError, ValueError) as error:
        raise VocabularyError(
            f"no vocabulary of {size} pieces from this text: {_reason(error)}"
        ) from None
    with files.writing(path) as partial:
        partial.write_bytes(model.getvalue())
    return load(path).size


def _reason(error: Exception) -> str:
    """Says in words what sentencepiece asserts."""
    found = re.search(r"required_chars\. \d+ vs (\d+)", str(error))
    if found:
        return f"its characters alone need {found[1]}"
    return "it is too little, or none of its characters is text"


def cut(line: str) -> list[str]:
    """Cuts a line into parts of at most MAX_SENTENCE_BYTES, at spaces if it has any."""
    most = MAX_SENTENCE_BYTES // 4  # bytes of a character
    if len(line.encode()) <= MAX_SENTENCE_BYTES:
        return [line]
    return textwrap.wrap(line, most, break_on_hyphens=False)


def load(path: pathlib.Path) -> Vocabulary:
    """Reads a model file made by `train`, or a pretrained model's tokenizer folder.

    VocabularyError if there is none, or its special pieces are others.
    """
    if path.is_dir():
        return _from_tokenizer(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise VocabularyError(f"vocabulary {path}: {error.strerror}") from None
    with installed.extra("experiments"):
        import sentencepiece
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.load_from_serialized_proto(content)
        pieces = tuple(processor.id_to_piece(i) for i in range(NUM_SPECIAL))
    except (RuntimeError, IndexError):
        raise VocabularyError(f"{path} is not a sentencepiece model") from None
    if pieces != PIECES:
        raise VocabularyError(
            f"{path} begins with {' '.join(pieces)}; expected {' '.join(PIECES)}"
        )
    digest = hashlib.sha256(content).hexdigest()
    return Vocabulary(
        path,
        processor.encode,
        processor.get_piece_size(),
        digest,
        piece=processor.id_to_piece,
    )


def _from_tokenizer(folder: pathlib.Path) -> Vocabulary:
    """Reads a tokenizer, and moves its special pieces to the front."""
    tokenizer = tokenizers.load(folder)
    special = tokenizer.special.ids
    text = np.setdiff1d(np.arange(tokenizer.size), special)
    order = np.concatenate([np.asarray(special), text])
    new_ids = np.argsort(order)

    def encode(text: str) -> list[int]:
        return new_ids[np.asarray(tokenizer.encode(text), np.int64)].tolist()

    rows = tokenizer.old_ids[order].astype(np.int32)
    return Vocabulary(
        folder,
        encode,
        tokenizer.size,
        tokenizer.digest,
        rows,
        piece=lambda number: tokenizer.piece(int(order[number])),
    )
