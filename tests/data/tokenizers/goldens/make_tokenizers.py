"""Writes the golden files beside it: small vocabularies, and transformers' ids by them.

    pip install -r requirements.txt && pip install -r requirements-parity.txt
    python tests/data/tokenizers/goldens/make_tokenizers.py

In an environment of its own: the second line takes older versions of two packages.
"""

import io
import json
import pathlib

import sentencepiece
import transformers
from transformers.models.deprecated import ernie_m

FOLDER = pathlib.Path(__file__).parent

TEXTS = [
    "The children don't walk; it's 3,000 miles.",
    "ÉCOLE élève über naïve Ärger",
    "我们 walked in 2022年, A4 paper?",
    "unwalkable walks walked walking",
    "  two  spaces\tand a tab ",
    "x² costs $3.50 (or €2)...",
    "ﬁne print – “quoted”",
    "",
]

WORD_PIECES = """
[PAD] [unused0] [UNK] [CLS] [SEP] [MASK] ! " $ ( ) , - . ; ? ' “ ” – € 2 3 4 50 000
##4 我 们 年 2022 the The children don t walk walks ##s ##ed ##ing un ##walk ##able it
s miles ecole école élève eleve ÉCOLE uber über naive naïve arger Ärger in a A paper
two spaces and tab x ##² costs or fine ﬁ ##ne print quoted
""".split()  # noqa: SIM905


def train_sentencepiece() -> bytes:
    """A unigram model of a few kB: without NFKC, whose table alone has 240."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text for text in TEXTS[:6] * 20 if text),
        model_writer=model,
        model_type="unigram",
        vocab_size=110,
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        minloglevel=2,
    )
    return model.getvalue()


def main() -> None:
    """Writes vocabularies and tokenizers.json."""
    vocab = FOLDER / "bert_vocab.txt"
    vocab.write_text("".join(piece + "\n" for piece in WORD_PIECES), "utf-8")
    model = FOLDER / "sentencepiece.bpe.model"
    model.write_bytes(train_sentencepiece())
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    own = [processor.id_to_piece(i) for i in range(3, processor.get_piece_size())]
    # ERNIE-M's list has no space alone, and has what its own cutting makes.
    controls = ["[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]"]
    pieces = [*controls, *own, "2022", "3", "4", "年"]
    ernie = FOLDER / "ernie_m_vocab.txt"
    unique = dict.fromkeys(pieces)
    ernie.write_text("".join(piece + "\n" for piece in unique), "utf-8")

    readers = {
        "bert_uncased": transformers.BertTokenizer(str(vocab), do_lower_case=True),
        "bert_cased": transformers.BertTokenizer(str(vocab), do_lower_case=False),
        "xlm_r": transformers.XLMRobertaTokenizer(str(model)),
        "ernie_m": ernie_m.ErnieMTokenizer(str(model), str(ernie)),
    }
    golden = {"made_with": f"transformers {transformers.__version__}"}
    for name, reader in readers.items():
        golden[name] = {
            "ids": [reader.encode(text, add_special_tokens=False) for text in TEXTS],
            "special": [
                getattr(reader, f"{name}_token_id")
                for name in ("pad", "unk", "cls", "sep", "mask")
            ],
            "size": len(reader),
        }
    golden["texts"] = TEXTS
    (FOLDER / "tokenizers.json").write_text(
        json.dumps(golden, ensure_ascii=False, separators=(",", ":")) + "\n", "utf-8"
    )


if __name__ == "__main__":
    main()
