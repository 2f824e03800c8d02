"""The codecs by name: `codecs.svd(0.6)` here, `svd(0.6)` in a flag.

A codec is to a tensor on the wire what an optax transformation is to a gradient.
`chain` applies several; `from_string` reads one from a flag, also one of your own.

    codec = codecs.chain(codecs.svd(0.6), codecs.fp16())
    codec = codecs.from_string("svd(0.6)|fp16")        # the same
    payload, state = codec.encode(h, codec.init(h))    # arrays, on the device
"""

from nebula_jax.communication.codec import Codec, identity, ratio, stateless, zstd
from nebula_jax.communication.codecs.bits import bits_for
from nebula_jax.communication.codecs.block_floats import e3m0
from nebula_jax.communication.codecs.block_sparse import sparse_loco
from nebula_jax.communication.codecs.conformance import Report, check
from nebula_jax.communication.codecs.floats import bf16, fp16
from nebula_jax.communication.codecs.integers import int4, int8
from nebula_jax.communication.codecs.leaves import per_leaf
from nebula_jax.communication.codecs.low_rank import svd
from nebula_jax.communication.codecs.packing import pack_ids, pack_tokens
from nebula_jax.communication.codecs.parser import NAMES, CodecError, from_string
from nebula_jax.communication.codecs.privacy import epsilon, private
from nebula_jax.communication.codecs.rotations import hadamard
from nebula_jax.communication.codecs.wrappers import error_feedback, from_step
from nebula_jax.communication.selector import Selector, chain

__all__ = [
    "NAMES",
    "Codec",
    "CodecError",
    "Report",
    "Selector",
    "bf16",
    "bits_for",
    "chain",
    "check",
    "e3m0",
    "epsilon",
    "error_feedback",
    "fp16",
    "from_step",
    "from_string",
    "hadamard",
    "identity",
    "int4",
    "int8",
    "pack_ids",
    "pack_tokens",
    "per_leaf",
    "private",
    "ratio",
    "sparse_loco",
    "stateless",
    "svd",
    "zstd",
]
