"""Four-bit integers of fewer levels, of which zstd makes fewer bytes than of all.

In a codec string: `pack_tokens|scripts.few_levels:few(4)|fp16|zstd(1)`.
"""

from nebula_jax.communication import codec
from nebula_jax.communication.codecs import integers


def few(most: int) -> codec.Codec:
    """Quantizes as `int4(row)` does, with s = max|x| / most of a row.

    Args:
      most: the largest |q|, from 1 to 7, which is `int4(row)`.

    Raises:
      ValueError: if it is none of these.
    """
    if most not in range(1, 8):
        raise ValueError(f"most must be 1 to 7, not {most}")
    return integers._integers(
        "few", most, integers.pack_nibbles, integers.unpack_nibbles, "row"
    )
