"""Tokenizer files, each read with the library that wrote it.

spiece.model                            sentencepiece's own numbering
tokenizer.json                          tokenizers
sentencepiece.bpe.model + vocab.txt     sentencepiece, then ERNIE-M's own step
sentencepiece.bpe.model                 sentencepiece, XLM-R's numbering
vocab.txt                               tokenizers, BERT's WordPiece
"""

import itertools
import json
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from nebula_jax import errors, installed
from nebula_jax.data import tsv

JSON = "tokenizer.json"
SENTENCEPIECE = "sentencepiece.bpe.model"
VOCABULARY = "vocab.txt"
SPIECE = "spiece.model"
CONFIG = "tokenizer_config.json"
FILES = (JSON, SENTENCEPIECE, VOCABULARY, SPIECE, CONFIG)
_UNIGRAM = 1  # sentencepiece's number of this type of model
_SPACE = "▁"
_PUNCTUATION = set(",;:.?!~，；：。？！《》【】")


class TokenizerError(errors.NebulaError):
    """A tokenizer that is missing, damaged or of an unknown kind."""


class NoTokenizerError(TokenizerError):
    """A folder without a tokenizer's files."""


class Library(NamedTuple):
    """A library's tokenizer, in the library's own numbering."""

    encode_batch: Callable[[Sequence[str]], list[list[int]]]
    decode: Callable[[list[int]], str]
    pieces: list[str]
    has_spaces: bool = True  # False if pieces have none: `decode` puts them after words


def read(folder: pathlib.Path) -> tuple[Library, tuple[str, ...]]:
    """Reads the tokenizer of a folder, and the names of the files that define it.

    NoTokenizerError if no file of one is there; TokenizerError if one is damaged.
    """
    fitting = [
        (names, reader)
        for names, reader in _READERS
        if all((folder / name).exists() for name in names)
    ]
    if not fitting:
        raise NoTokenizerError(
            f"{folder} has no tokenizer: none of {JSON}, {SENTENCEPIECE}, {VOCABULARY},"
            f" {SPIECE}"
        )
    names, reader = fitting[0]
    try:
        library = reader(folder)
    except TokenizerError:
        raise
    except Exception as error:  # the libraries raise bare Exceptions
        reason = " ".join(str(error).split())
        raise TokenizerError(f"{folder / names[0]} cannot be read: {reason}") from None
    return library, tuple(n for n in (*names, CONFIG) if (folder / n).exists())


def _settings(folder: pathlib.Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        settings = json.loads(path.read_text("utf-8-sig")) if path.exists() else {}
    except ValueError as error:
        raise TokenizerError(f"{path} is no JSON: {error}") from None
    return settings if isinstance(settings, dict) else {}


def _read_json(folder: pathlib.Path) -> Library:
    with installed.extra("experiments"):
        import tokenizers
    return _from_tokenizers(tokenizers.Tokenizer.from_file(str(folder / JSON)))


def _listed(folder: pathlib.Path) -> list[str]:
    """Reads the pieces of vocab.txt, in the order of their ids."""
    return [line for _, line in tsv.lines(folder / VOCABULARY)]


def _read_word_pieces(folder: pathlib.Path) -> Library:
    """Builds a WordPiece tokenizer of vocab.txt, with the steps of BERT's own."""
    with installed.extra("experiments"):
        import tokenizers
        from tokenizers import decoders, models, normalizers, pre_tokenizers
    settings = _settings(folder)
    lower = settings.get("do_lower_case", True)  # transformers' default
    ids = {piece.rstrip(): number for number, piece in enumerate(_listed(folder))}
    built = tokenizers.Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    built.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
        strip_accents=settings.get("strip_accents"),  # None: if lower-cased
        lowercase=lower,
    )
    built.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    built.decoder = decoders.WordPiece(cleanup=False)
    return _from_tokenizers(built)


def _from_tokenizers(built: Any) -> Library:
    """Wraps a tokenizer of the library `tokenizers`."""
    from tokenizers import decoders, models

    # all-MiniLM's file cuts at 128 tokens and pads to 128.
    built.no_truncation()
    built.no_padding()
    built.encode_special_tokens = True  # "[SEP]" in a text is text
    is_word_piece = isinstance(built.model, models.WordPiece)
    if is_word_piece:
        # Not the library's own cleaning: it writes "do not" as "don't".
        built.decoder = decoders.WordPiece(cleanup=False)

    def encode_batch(texts: Sequence[str]) -> list[list[int]]:
        encodings = built.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(ids: list[int]) -> str:
        return built.decode(ids, skip_special_tokens=True).strip()

    vocabulary = built.get_vocab(with_added_tokens=True)
    pieces = [""] * (max(vocabulary.values()) + 1)
    for piece, number in vocabulary.items():
        pieces[number] = piece
    return Library(encode_batch, decode, pieces, has_spaces=not is_word_piece)


def _load_processor(path: pathlib.Path) -> Any:
    with installed.extra("experiments"):
        import sentencepiece
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.load_from_serialized_proto(path.read_bytes())
    except RuntimeError:  # it has an assertion of the library's source
        raise TokenizerError(
            f"{path} cannot be read: it is no sentencepiece model"
        ) from None
    return processor


def _read_spiece(folder: pathlib.Path) -> Library:
    """Reads a sentencepiece model that numbers its pieces itself."""
    processor = _load_processor(folder / SPIECE)
    pieces = [processor.id_to_piece(i) for i in range(processor.get_piece_size())]
    return Library(
        lambda texts: processor.encode(list(texts)), processor.decode, pieces
    )


def _read_xlm_r(folder: pathlib.Path) -> Library:
    """Reads sentencepiece's pieces in fairseq's numbering.

    Four special pieces, the model's own from its fourth on, then a mask.
    """
    processor = _load_processor(folder / SENTENCEPIECE)
    size = processor.get_piece_size()
    text_pieces = [processor.id_to_piece(i) for i in range(3, size)]
    pieces = ["<s>", "<pad>", "</s>", "<unk>", *text_pieces, "<mask>"]
    unk = pieces.index("<unk>")

    def encode_batch(texts: Sequence[str]) -> list[list[int]]:
        encodings = processor.encode(list(texts))
        return [[i + 1 if i > 2 else unk for i in ids] for ids in encodings]

    def decode(ids: list[int]) -> str:
        return processor.decode([i - 1 for i in ids])

    return Library(encode_batch, decode, pieces)


def _read_ernie_m(folder: pathlib.Path) -> Library:
    """Reads sentencepiece's pieces, cut further, numbered by a list of their own."""
    processor = _load_processor(folder / SENTENCEPIECE)
    pieces = _listed(folder)
    ids = {piece: number for number, piece in enumerate(pieces)}
    unk = ids.get("[UNK]", 0)

    def encode_batch(texts: Sequence[str]) -> list[list[int]]:
        encodings = processor.encode(list(texts), out_type=str)
        return [[ids.get(p, unk) for p in _cut(each)] for each in encodings]

    def decode(ids: list[int]) -> str:
        return "".join(pieces[i] for i in ids).replace("▁", " ").strip()

    return Library(encode_batch, decode, pieces)


def _cut(pieces: Sequence[str]) -> Iterator[str]:
    """Cuts sentencepiece's pieces as ERNIE-M does: Chinese, digits, punctuation apart.

    Paddle's tokenizer does it (and transformers' after it): its list of pieces was made
    of the results. A space stays with letters, and alone only inside a word.

    >>> list(_cut(["▁in", "▁2022年", ",", "▁", "A4"]))
    ['▁in', '2022', '年', ',', '▁', 'A', '4']
    """
    for number, piece in enumerate(pieces):
        if piece == _SPACE:
            after = pieces[number + 1 : number + 2]
            if number and after and not after[0].startswith(_SPACE):
                yield _SPACE
            continue
        for kind, run in itertools.groupby(piece, _kind_of):
            if kind == "apart":
                yield from run
            elif (text := "".join(run)) != _SPACE:
                yield text


def _kind_of(character: str) -> str:
    if character.isdigit():
        return "digit"
    if character in _PUNCTUATION or "\u4e00" <= character <= "\u9fff":
        return "apart"
    return "letter"


def describe_spiece(
    folder: pathlib.Path, special: Sequence[str], max_length: int | None = None
) -> None:
    """Writes tokenizer.json and tokenizer_config.json for a folder's spiece.model.

    transformers has no class for a sentencepiece model with BERT's special pieces; its
    AutoTokenizer reads this description. A pair has one token type and two separators,
    as an encoder without token types is trained here
    (`ragged_rows.has_double_separator`). A BPE model gets none: it would lack merges.
    `special` are the pieces for pad, unk, cls, sep and mask; `max_length` the positions
    of the encoder, None to leave long texts uncut.
    """
    with installed.extra("experiments"):
        import tokenizers
        from sentencepiece import sentencepiece_model_pb2
        from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
    model = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    model.ParseFromString((folder / SPIECE).read_bytes())
    if model.trainer_spec.model_type != _UNIGRAM:
        return
    pieces = [(piece.piece, piece.score) for piece in model.pieces]
    unk = model.trainer_spec.unk_id
    made = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=unk))
    # sentencepiece's own steps: NFKC as its table has it, then single spaces.
    made.normalizer = normalizers.Sequence(
        [
            normalizers.Precompiled(model.normalizer_spec.precompiled_charsmap),
            normalizers.Strip(),
            normalizers.Replace(tokenizers.Regex(" {2,}"), " "),
        ]
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    _, _, cls, sep, _ = special
    made.post_processor = processors.TemplateProcessing(
        single=f"{cls}:0 $A:0 {sep}:0",
        pair=f"{cls}:0 $A:0 {sep}:0 {sep}:0 $B:0 {sep}:0",
        special_tokens=[(piece, made.token_to_id(piece)) for piece in (cls, sep)],
    )
    made.add_special_tokens(list(special))
    made.save(str(folder / JSON))
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"],
        **dict(zip(names, special, strict=True)),
        **({"model_max_length": max_length} if max_length else {}),
    }
    (folder / CONFIG).write_text(json.dumps(settings, indent=1) + "\n", "utf-8")


# The first row whose files are all there counts. Beside spiece.model, tokenizer.json is
# made of it, for transformers (`describe_spiece`).
_READERS = (
    ((SPIECE,), _read_spiece),
    ((JSON,), _read_json),
    ((SENTENCEPIECE, VOCABULARY), _read_ernie_m),
    ((SENTENCEPIECE,), _read_xlm_r),
    ((VOCABULARY,), _read_word_pieces),
)
