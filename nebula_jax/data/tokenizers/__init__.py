"""Tokenizers of pretrained models.

    tokenizer = tokenizers.load(pathlib.Path("pretrained/minilm-l6"))
    tokenizer.decode(tokenizer.encode("It doesn't rain."))  # it doesn't rain.

A folder holds the files of one kind of tokenizer (see `readers`). A trimmed tokenizer
is the whole one with another numbering, and its folder holds the whole one's files and
`kept_pieces.json`. V pieces of the whole tokenizer, N pieces of the trimmed one.
"""

import functools
import hashlib
import itertools
import json
import operator
import pathlib
import shutil
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from nebula_jax.data.tokenizers import detokenize, readers

KEPT = "kept_pieces.json"  # the ids that a trimmed tokenizer keeps of the whole one
WHOLE = "whole_tokenizer"  # folder of the whole tokenizer's files, in a trimmed one's
COUNT_BATCH = 4096  # texts tokenized at once: enough for all cores, little memory

# Names of the special pieces, in the order pad, unk, cls, sep, mask.
SPECIAL_PIECES = (
    ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),  # BERT, ELECTRA, ERNIE-M
    ("<pad>", "<unk>", "<s>", "</s>", "<mask>"),  # XLM-R, e5
)

TokenizerError = readers.TokenizerError
NoTokenizerError = readers.NoTokenizerError


class SpecialTokens(NamedTuple):
    """The token ids that are no text, and the size of the vocabulary they belong to."""

    pad: int
    unk: int
    cls: int
    sep: int
    mask: int
    size: int  # pieces of the vocabulary, these five included

    @property
    def ids(self) -> tuple[int, int, int, int, int]:
        """The ids of pad, unk, cls, sep and mask."""
        return self[:5]

    def contains(self, ids: Any) -> Any:
        """Marks ids that are special: integers of NumPy or JAX -> bool of the same."""
        return functools.reduce(operator.or_, (ids == each for each in self.ids))


class Tokenizer(NamedTuple):
    """A loaded tokenizer."""

    folder: pathlib.Path
    library: readers.Library
    new_ids: np.ndarray
    """[V] int32: id of each of the library's; unk's for special and dropped pieces."""
    old_ids: np.ndarray  # [N] int32: the inverse, and what `trimming.trim` keeps
    digest: str  # SHA-256 of the files and of what is kept, which clusters compare
    special: SpecialTokens

    @property
    def size(self) -> int:
        """The number of pieces, N."""
        return self.special.size

    def encode(self, text: str) -> list[int]:
        """Encodes a text; what reads like a special token, such as "[SEP]", is text.

        Unk is the one special token among the ids.
        """
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes each text as `encode` does, on all cores where the library can."""
        encodings = self.library.encode_batch(texts)
        return [self.new_ids[np.asarray(ids, np.int64)].tolist() for ids in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """Writes ids as text; special tokens, unk too, are left out."""
        special = set(self.special.ids)
        text_ids = [self.old_ids[i] for i in ids if int(i) not in special]
        text = self.library.decode([int(i) for i in text_ids])
        return text if self.library.has_spaces else detokenize.english(text)

    def piece(self, token_id: int) -> str:
        """Returns the piece of an id, as the library writes it."""
        return self.library.pieces[self.old_ids[token_id]]


def load(folder: pathlib.Path) -> Tokenizer:
    """Reads a folder's tokenizer; NoTokenizerError without one, else TokenizerError."""
    folder = pathlib.Path(folder)
    if (folder / KEPT).exists():
        whole = _load_whole(folder / WHOLE)
        return _trimmed(whole, _read_kept(folder / KEPT, whole))
    return _load_whole(folder)


def _load_whole(folder: pathlib.Path) -> Tokenizer:
    library, names = readers.read(folder)
    digest = hashlib.sha256()
    for name in names:
        digest.update(hashlib.sha256((folder / name).read_bytes()).digest())
    special = _special_tokens(folder, library)
    old_ids = np.arange(len(library.pieces), dtype=np.int32)
    new_ids = old_ids.copy()
    new_ids[list(special.ids)] = special.unk  # a text with "[SEP]" in it has no SEP
    return Tokenizer(folder, library, new_ids, old_ids, digest.hexdigest(), special)


def _special_tokens(folder: pathlib.Path, library: readers.Library) -> SpecialTokens:
    ids = {piece: number for number, piece in enumerate(library.pieces)}
    for names in SPECIAL_PIECES:
        if all(name in ids for name in names):
            found = [ids[name] for name in names]
            return SpecialTokens._make([*found, len(library.pieces)])
    raise TokenizerError(
        f"{folder}: neither {' '.join(SPECIAL_PIECES[0])} nor"
        f" {' '.join(SPECIAL_PIECES[1])} are among its pieces"
    )


def count_pieces(tokenizer: Tokenizer, texts: Iterable[str]) -> np.ndarray:
    """Counts how often each piece occurs in texts: [N] int64."""
    counts = np.zeros(tokenizer.size, np.int64)
    remaining = iter(texts)
    while batch := list(itertools.islice(remaining, COUNT_BATCH)):
        ids = itertools.chain.from_iterable(tokenizer.encode_batch(batch))
        counts += np.bincount(np.fromiter(ids, np.int64), minlength=tokenizer.size)
    return counts


def kept_ids(tokenizer: Tokenizer, keep_ids: Iterable[int]) -> np.ndarray:
    """Adds the special tokens to ids to keep: [N] int64, ascending, each once.

    Give the result to `trim` and to `trimming.trim`, so that tokenizer and model agree
    (`trimming.trim_to` does both). TokenizerError if an id is out of range.
    """
    keep = np.unique([*map(int, keep_ids), *tokenizer.special.ids])
    if keep[0] < 0 or keep[-1] >= tokenizer.size:
        raise TokenizerError(f"ids to keep must be in 0...{tokenizer.size - 1}")
    return keep


def trim(tokenizer: Tokenizer, keep_ids: Iterable[int]) -> Tokenizer:
    """Keeps only some pieces: the i-th smallest id kept becomes i, others become unk.

    A tokenizer may be trimmed again; TokenizerError if an id is out of range.
    """
    return _trimmed(tokenizer, kept_ids(tokenizer, keep_ids))


def _trimmed(tokenizer: Tokenizer, keep: np.ndarray) -> Tokenizer:
    unk, *_ = np.flatnonzero(keep == tokenizer.special.unk)
    renumbered = np.full(tokenizer.size, unk, np.int32)
    renumbered[keep] = np.arange(len(keep))
    digest = hashlib.sha256(tokenizer.digest.encode())
    digest.update(keep.astype("<i8").tobytes())
    special = (int(renumbered[i]) for i in tokenizer.special.ids)
    return tokenizer._replace(
        new_ids=renumbered[tokenizer.new_ids],
        old_ids=tokenizer.old_ids[keep],
        digest=digest.hexdigest(),
        special=SpecialTokens._make([*special, len(keep)]),
    )


def save(
    folder: pathlib.Path, tokenizer: Tokenizer, max_length: int | None = None
) -> None:
    """Copies the files that a tokenizer was read from, and notes which ids it keeps.

    A sentencepiece model gets files beside it that transformers reads. The files of a
    trimmed one go into a folder inside: transformers, which would take them for the
    model's, finds no tokenizer instead of wrong ids. The folder is made if missing;
    `load` reads the same tokenizer from it, but for the digest of one that was trimmed
    twice. transformers cuts texts to `max_length`, the positions of the model.
    TokenizerError if the disk does not take it.
    """
    try:
        is_trimmed = tokenizer.size < len(tokenizer.library.pieces)
        target = folder / WHOLE if is_trimmed else folder
        target.mkdir(parents=True, exist_ok=True)
        for name in readers.FILES:
            source = tokenizer.folder / name
            if source.exists() and source.resolve() != (target / name).resolve():
                shutil.copyfile(source, target / name)
        is_own = (target / readers.SPIECE).exists()
        if is_own and not is_trimmed and not (target / readers.JSON).exists():
            special = [tokenizer.piece(each) for each in tokenizer.special.ids]
            readers.describe_spiece(target, special, max_length)
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
    except (ValueError, KeyError, TypeError, RecursionError, TokenizerError):
        fits = False
    if not fits:
        raise TokenizerError(f"{path} does not fit the tokenizer in {whole.folder}")
    return keep
