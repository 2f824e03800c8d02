"""Tokenizers of pretrained models, read with the libraries that made them.

(ERNIE-M's has a step of its own after its library's: `ernie_m_pieces`.)

    words = tokenizer.load(pathlib.Path("pretrained/minilm-l6"))
    words.decode(words.encode("It doesn't rain."))  # it doesn't rain.

A folder may hold `tokenizer.json` (read with tokenizers), `sentencepiece.bpe.model`
(XLM-R's numbering; with a `vocab.txt` beside it, ERNIE-M's), `vocab.txt` (BERT's), or
`spiece.model` (sentencepiece's own numbering, as in `data/vocab.py`).

A trimmed tokenizer is the whole one with another numbering. It lies in a folder as the
whole one's files and `kept_pieces.json`.

V pieces of the whole tokenizer, N of the trimmed one.
"""

import hashlib
import itertools
import json
import pathlib
import shutil
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from nebula_jax import errors
from nebula_jax.data.tokenizers import detokenize, ernie_m

JSON = "tokenizer.json"
SENTENCEPIECE = "sentencepiece.bpe.model"
VOCABULARY = "vocab.txt"
OWN = "spiece.model"
CONFIG = "tokenizer_config.json"
KEPT = "kept_pieces.json"  # of a trimmed one
WHOLE = "whole_tokenizer"  # the folder of its files

COUNT_BATCH = 4096  # texts tokenised at once: enough for all cores, little memory

# What the special pieces are called, in the order pad, unk, cls, sep, mask.
SPECIAL_PIECES = (
    ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),  # BERT, ELECTRA, ERNIE-M
    ("<pad>", "<unk>", "<s>", "</s>", "<mask>"),  # XLM-R, e5
)


class TokenizerError(errors.NebulaError):
    """A tokenizer is missing, damaged or of a kind that we do not read."""


class NoTokenizerError(TokenizerError):
    """A folder has no file of a tokenizer."""


class Library(NamedTuple):
    """What a library does for us, in its own numbering."""

    encode_batch: Callable[[Sequence[str]], list[list[int]]]
    decode: Callable[[list[int]], str]
    pieces: list[str]


class Tokenizer(NamedTuple):
    """A loaded tokenizer. `digest` is what clusters compare when they meet."""

    folder: pathlib.Path
    library: Library
    new_ids: np.ndarray
    """[V] int32: id of each of the library's; unk's for special and dropped pieces."""
    old_ids: np.ndarray
    """[N] int32: the inverse, and what `pretrained.trim` keeps."""
    digest: str
    """SHA-256 of the files and of what is kept."""
    pad: int
    unk: int
    cls: int
    sep: int
    mask: int

    @property
    def size(self) -> int:
        """N, number of pieces."""
        return len(self.old_ids)

    @property
    def special_ids(self) -> tuple[int, ...]:
        """Ids of pad, unk, cls, sep and mask, which are no text."""
        return self.pad, self.unk, self.cls, self.sep, self.mask

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without special pieces (but unk), whatever is in the text."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each, on all cores where the library can."""
        found = self.library.encode_batch(texts)
        return [self.new_ids[np.asarray(ids, np.int64)].tolist() for ids in found]

    def decode(self, ids: Iterable[int]) -> str:
        """Text as a person would write it; special pieces, unk too, are left out."""
        special = set(self.special_ids)
        kept = [self.old_ids[i] for i in ids if int(i) not in special]
        return self.library.decode([int(i) for i in kept])

    def piece(self, token_id: int) -> str:
        """The piece of an id, as the library writes it."""
        return self.library.pieces[self.old_ids[token_id]]


def load(folder: pathlib.Path) -> Tokenizer:
    """Reads the tokenizer of a checkpoint folder.

    Raises:
      TokenizerError: if there is none, or it cannot be read.
    """
    folder = pathlib.Path(folder)
    if not (folder / KEPT).exists():
        return _read(folder)
    whole = _read(folder / WHOLE)
    return _trimmed(whole, _read_kept(folder / KEPT, whole))


def _read(folder: pathlib.Path) -> Tokenizer:
    there = [
        reader
        for reader in _READERS
        if all((folder / name).exists() for name in reader[0])
    ]
    if not there:
        raise NoTokenizerError(
            f"{folder} has no tokenizer: none of {JSON}, {SENTENCEPIECE}, {VOCABULARY},"
            f" {OWN}"
        )
    names, read = there[0]
    digest = hashlib.sha256()
    for name in (*names, CONFIG):
        if (folder / name).exists():
            digest.update(hashlib.sha256((folder / name).read_bytes()).digest())
    try:
        library = read(folder)
    except TokenizerError:
        raise
    except Exception as error:  # the libraries raise bare Exceptions
        reason = " ".join(str(error).split())
        raise TokenizerError(f"{folder / names[0]} cannot be read: {reason}") from None
    return _numbered(folder, library, digest.hexdigest())


def _numbered(folder: pathlib.Path, library: Library, digest: str) -> Tokenizer:
    ids = {piece: number for number, piece in enumerate(library.pieces)}
    for names in SPECIAL_PIECES:
        if all(name in ids for name in names):
            special = tuple(ids[name] for name in names)
            break
    else:
        raise TokenizerError(
            f"{folder}: neither {' '.join(SPECIAL_PIECES[0])} nor"
            f" {' '.join(SPECIAL_PIECES[1])} are among its pieces"
        )
    old_ids = np.arange(len(library.pieces), dtype=np.int32)
    new_ids = old_ids.copy()
    new_ids[list(special)] = special[1]  # a text that has "[SEP]" in it has no SEP
    return Tokenizer(folder, library, new_ids, old_ids, digest, *special)


def count_pieces(tokenizer: Tokenizer, texts: Iterable[str]) -> np.ndarray:
    """How often each piece occurs: [N] int64."""
    counts = np.zeros(tokenizer.size, np.int64)
    remaining = iter(texts)
    while batch := list(itertools.islice(remaining, COUNT_BATCH)):
        ids = itertools.chain.from_iterable(tokenizer.encode_batch(batch))
        counts += np.bincount(np.fromiter(ids, np.int64), minlength=tokenizer.size)
    return counts


def kept_ids(tokenizer: Tokenizer, keep_ids: Iterable[int]) -> np.ndarray:
    """The ids that `trim` keeps: those asked for and all special ones, ascending.

    Give them to `pretrained.trim` too, so that model and tokenizer agree.

    >>> keep = tokenizer.kept_ids(words, np.flatnonzero(counts))
    >>> words, model = tokenizer.trim(words, keep), pretrained.trim(model, keep)
    """
    keep = np.unique([*map(int, keep_ids), *tokenizer.special_ids])
    if keep[0] < 0 or keep[-1] >= tokenizer.size:
        raise TokenizerError(f"ids to keep must be in 0...{tokenizer.size - 1}")
    return keep


def trim(tokenizer: Tokenizer, keep_ids: Iterable[int]) -> Tokenizer:
    """Keeps only some pieces: the i-th smallest id kept becomes i, others become unk.

    Args:
      tokenizer: may itself have been trimmed.
      keep_ids: ids to keep; the special ones are kept anyway.

    Returns:
      A tokenizer with its own digest.

    Raises:
      TokenizerError: if an id is out of range.
    """
    return _trimmed(tokenizer, kept_ids(tokenizer, keep_ids))


def _trimmed(tokenizer: Tokenizer, keep: np.ndarray) -> Tokenizer:
    unk, *_ = np.flatnonzero(keep == tokenizer.unk)
    renumbered = np.full(tokenizer.size, unk, np.int32)
    renumbered[keep] = np.arange(len(keep))
    digest = hashlib.sha256(tokenizer.digest.encode())
    digest.update(keep.astype("<i8").tobytes())
    special = (int(renumbered[i]) for i in tokenizer.special_ids)
    return Tokenizer(
        tokenizer.folder,
        tokenizer.library,
        renumbered[tokenizer.new_ids],
        tokenizer.old_ids[keep],
        digest.hexdigest(),
        *special,
    )


def save(folder: pathlib.Path, tokenizer: Tokenizer) -> None:
    """Copies the files it was read from, and says what is kept of it.

    The files of a trimmed one go into a folder of their own: transformers, which would
    take them for the model's, finds no tokenizer instead of wrong ids.

    Args:
      folder: made if missing; `load` reads the same tokenizer from it. What it keeps
        counts from the whole tokenizer, so its digest is not that of one that was
        trimmed twice.
      tokenizer: any.

    Raises:
      TokenizerError: if the disk does not take it.
    """
    try:
        is_trimmed = tokenizer.size < len(tokenizer.library.pieces)
        files = folder / WHOLE if is_trimmed else folder
        files.mkdir(parents=True, exist_ok=True)
        for name in (JSON, SENTENCEPIECE, VOCABULARY, OWN, CONFIG):
            source = tokenizer.folder / name
            if source.exists() and source.resolve() != (files / name).resolve():
                shutil.copyfile(source, files / name)
        (folder / KEPT).unlink(missing_ok=True)
        if is_trimmed:
            kept = {"kept_ids": tokenizer.old_ids.tolist()}
            (folder / KEPT).write_text(json.dumps(kept) + "\n", "utf-8")
    except OSError as error:
        raise TokenizerError(f"cannot write {folder}: {error}") from None


def _read_kept(path: pathlib.Path, whole: Tokenizer) -> np.ndarray:
    try:
        keep = np.asarray(json.loads(path.read_text("utf-8"))["kept_ids"], np.int64)
        fits = np.array_equal(keep, kept_ids(whole, keep))
    except (ValueError, KeyError, TypeError, TokenizerError):
        fits = False
    if not fits:
        raise TokenizerError(f"{path} does not fit the tokenizer in {whole.folder}")
    return keep


def _settings(folder: pathlib.Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        settings = json.loads(path.read_text("utf-8")) if path.exists() else {}
    except ValueError as error:
        raise TokenizerError(f"{path} is no JSON: {error}") from None
    return settings if isinstance(settings, dict) else {}


def _read_json(folder: pathlib.Path) -> Library:
    return _from_tokenizers(tokenizers.Tokenizer.from_file(str(folder / JSON)))


def _read_word_pieces(folder: pathlib.Path) -> Library:
    """vocab.txt, with the steps that BERT's own tokenizer takes."""
    settings = _settings(folder)
    lower = settings.get("do_lower_case", True)  # transformers' default
    vocabulary = models.WordPiece.read_file(str(folder / VOCABULARY))
    built = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    built.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
        strip_accents=settings.get("strip_accents"),  # None: if lower-cased
        lowercase=lower,
    )
    built.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    built.decoder = decoders.WordPiece(cleanup=False)
    return _from_tokenizers(built)


def _from_tokenizers(built: tokenizers.Tokenizer) -> Library:
    # all-MiniLM's file cuts at 128 tokens and pads to 128.
    built.no_truncation()
    built.no_padding()
    built.encode_special_tokens = True  # "[SEP]" in a text is text
    is_word_piece = isinstance(built.model, models.WordPiece)
    if is_word_piece:
        # Not the library's own cleaning: it writes "do not" as "don't".
        built.decoder = decoders.WordPiece(cleanup=False)

    def encode_batch(texts: Sequence[str]) -> list[list[int]]:
        found = built.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in found]

    def decode(ids: list[int]) -> str:
        text = built.decode(ids, skip_special_tokens=True)
        return detokenize.english(text) if is_word_piece else text.strip()

    vocabulary = built.get_vocab(with_added_tokens=True)
    pieces = [""] * (max(vocabulary.values()) + 1)
    for piece, number in vocabulary.items():
        pieces[number] = piece
    return Library(encode_batch, decode, pieces)


def _load_processor(
    folder: pathlib.Path, name: str = SENTENCEPIECE
) -> sentencepiece.SentencePieceProcessor:
    processor = sentencepiece.SentencePieceProcessor()
    processor.load_from_serialized_proto((folder / name).read_bytes())
    return processor


def _read_own(folder: pathlib.Path) -> Library:
    """A sentencepiece model that numbers its pieces itself."""
    processor = _load_processor(folder, OWN)
    pieces = [processor.id_to_piece(i) for i in range(processor.get_piece_size())]
    return Library(
        lambda texts: processor.encode(list(texts)), processor.decode, pieces
    )


def _read_xlm_r(folder: pathlib.Path) -> Library:
    """fairseq's numbering: four special pieces, the model's from its fourth, a mask."""
    processor = _load_processor(folder)
    size = processor.get_piece_size()
    own = [processor.id_to_piece(i) for i in range(3, size)]
    pieces = ["<s>", "<pad>", "</s>", "<unk>", *own, "<mask>"]
    unk = pieces.index("<unk>")

    def encode_batch(texts: Sequence[str]) -> list[list[int]]:
        found = processor.encode(list(texts))
        return [[i + 1 if i > 2 else unk for i in ids] for ids in found]

    def decode(ids: list[int]) -> str:
        return processor.decode([i - 1 for i in ids])

    return Library(encode_batch, decode, pieces)


def _read_ernie_m(folder: pathlib.Path) -> Library:
    """sentencepiece's pieces, cut further, numbered by a list of their own."""
    processor = _load_processor(folder)
    pieces = (folder / VOCABULARY).read_text("utf-8").removesuffix("\n").split("\n")
    ids = {piece: number for number, piece in enumerate(pieces)}
    unk = ids.get("[UNK]", 0)

    def encode_batch(texts: Sequence[str]) -> list[list[int]]:
        found = processor.encode(list(texts), out_type=str)
        return [[ids.get(p, unk) for p in ernie_m.cut(each)] for each in found]

    def decode(ids: list[int]) -> str:
        return "".join(pieces[i] for i in ids).replace("▁", " ").strip()

    return Library(encode_batch, decode, pieces)


_READERS = (
    ((JSON,), _read_json),
    ((SENTENCEPIECE, VOCABULARY), _read_ernie_m),
    ((SENTENCEPIECE,), _read_xlm_r),
    ((VOCABULARY,), _read_word_pieces),
    ((OWN,), _read_own),
)
