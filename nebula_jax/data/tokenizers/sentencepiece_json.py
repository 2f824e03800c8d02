"""tokenizer.json of a sentencepiece model, which transformers' AutoTokenizer reads.

transformers has no class for a sentencepiece model that has BERT's special pieces; its
general class reads this description of one. This project itself reads spiece.model.
"""

import json
import pathlib
from collections.abc import Sequence

from nebula_jax import installed
from nebula_jax.data.tokenizers import readers

UNIGRAM = 1  # sentencepiece's number of this type of model


def write(
    folder: pathlib.Path, special: Sequence[str], max_length: int | None = None
) -> None:
    """Writes tokenizer.json and tokenizer_config.json for a folder's spiece.model.

    A pair has one token type and two separators between its sentences, as an encoder
    without token types is trained here (`ragged_rows.has_double_separator`). Nothing is
    written for a BPE model: the file does not have its merges.

    Args:
      folder: with spiece.model.
      special: its pieces for pad, unk, cls, sep and mask.
      max_length: positions of the encoder; None leaves long texts uncut.
    """
    with installed.extra("experiments"):
        import tokenizers
        from sentencepiece import sentencepiece_model_pb2
        from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
    model = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    model.ParseFromString((folder / readers.SPIECE).read_bytes())
    if model.trainer_spec.model_type != UNIGRAM:
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
    made.save(str(folder / readers.JSON))
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"],
        **dict(zip(names, special, strict=True)),
        **({"model_max_length": max_length} if max_length else {}),
    }
    (folder / readers.CONFIG).write_text(json.dumps(settings, indent=1) + "\n", "utf-8")
