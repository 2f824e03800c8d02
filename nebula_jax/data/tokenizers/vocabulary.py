"""The shared vocabulary: five control pieces, then the text's own.

It is a sentencepiece model trained here, or a pretrained model's tokenizer with its
pieces in another order.

V pieces.
"""

import hashlib
import io
import os
import pathlib
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import sentencepiece

from nebula_jax import errors
from nebula_jax.data import tokenizers

PAD, UNK, CLS, SEP, MASK = range(5)
CONTROL_PIECES = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
NUM_CONTROL = len(CONTROL_PIECES)
"""Ids below this are never masked (they are no text)."""

MAX_SENTENCE_BYTES = 4192  # sentencepiece's own default; longer lines are left out


class VocabularyError(errors.NebulaError):
    """A vocabulary file is missing, unreadable or of another kind."""


class Vocabulary(NamedTuple):
    """A loaded vocabulary. `digest` is what clusters compare when they meet."""

    path: pathlib.Path
    encode: Callable[[str], list[int]]
    """Piece ids of a text, without control pieces (but [UNK])."""
    size: int
    """V."""
    digest: str
    rows: np.ndarray | None = None
    """[V] int32, each piece's id in the pretrained model's own, untrimmed tokenizer (of
    an untrimmed table: its row); None for a vocabulary that was trained here."""


def train(lines: Iterable[str], size: int, path: pathlib.Path, threads: int = 2) -> int:
    """Trains a unigram vocabulary (as XLM-R's) and writes it to `path`.

    Args:
      lines: sentences; the caller balances the languages.
      size: pieces wanted, control pieces included. A small text may yield fewer.
      path: where the model file goes; written whole or not at all.
      threads: CPU threads.

    Returns:
      The number of pieces the vocabulary has.

    Raises:
      VocabularyError: if the text is too little for any vocabulary.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="unigram",
            vocab_size=size,
            hard_vocab_limit=False,
            character_coverage=0.9995,
            pad_id=PAD,
            unk_id=UNK,
            bos_id=CLS,
            eos_id=SEP,
            pad_piece=CONTROL_PIECES[PAD],
            unk_piece=CONTROL_PIECES[UNK],
            bos_piece=CONTROL_PIECES[CLS],
            eos_piece=CONTROL_PIECES[SEP],
            control_symbols=[CONTROL_PIECES[MASK]],
            num_threads=threads,
            max_sentence_length=MAX_SENTENCE_BYTES,
            minloglevel=2,
        )
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[-1]
        raise VocabularyError(
            f"no vocabulary of {size} pieces from this text: {reason}"
        ) from None
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_bytes(model.getvalue())
    os.replace(partial, path)
    return load(path).size


def load(path: pathlib.Path) -> Vocabulary:
    """Reads a model file made by `train`, or a pretrained model's tokenizer folder.

    Raises:
      VocabularyError: if there is none, or its control pieces are not ours.
    """
    if path.is_dir():
        return _of_tokenizer(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise VocabularyError(f"vocabulary {path}: {error.strerror}") from None
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.load_from_serialized_proto(content)
        pieces = tuple(processor.id_to_piece(i) for i in range(NUM_CONTROL))
    except (RuntimeError, IndexError):
        raise VocabularyError(f"{path} is not a sentencepiece model") from None
    if pieces != CONTROL_PIECES:
        raise VocabularyError(
            f"{path} begins with {' '.join(pieces)};"
            f" expected {' '.join(CONTROL_PIECES)}"
        )
    digest = hashlib.sha256(content).hexdigest()
    return Vocabulary(path, processor.encode, processor.get_piece_size(), digest)


def _of_tokenizer(folder: pathlib.Path) -> Vocabulary:
    """The tokenizer's pieces, its own five control pieces moved to the front."""
    words = tokenizers.load(folder)
    text = np.setdiff1d(np.arange(words.size), words.special_ids)
    order = np.concatenate([np.asarray(words.special_ids), text])
    new_ids = np.argsort(order)

    def encode(text: str) -> list[int]:
        return new_ids[np.asarray(words.encode(text), np.int64)].tolist()

    rows = words.old_ids[order].astype(np.int32)
    return Vocabulary(folder, encode, words.size, words.digest, rows)
