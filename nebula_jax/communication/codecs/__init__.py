"""The codecs by name: `codecs.svd(0.6)` here, `svd(0.6)` in a flag."""

from nebula_jax.communication.codec import identity as identity
from nebula_jax.communication.codecs.bits import bits_for as bits_for
from nebula_jax.communication.codecs.block_floats import e3m0 as e3m0
from nebula_jax.communication.codecs.block_sparse import sparse_loco as sparse_loco
from nebula_jax.communication.codecs.differences import delta as delta
from nebula_jax.communication.codecs.floats import bf16 as bf16
from nebula_jax.communication.codecs.floats import fp8 as fp8
from nebula_jax.communication.codecs.floats import fp16 as fp16
from nebula_jax.communication.codecs.integers import int4 as int4
from nebula_jax.communication.codecs.integers import int8 as int8
from nebula_jax.communication.codecs.low_rank import subspace as subspace
from nebula_jax.communication.codecs.low_rank import svd as svd
from nebula_jax.communication.codecs.packing import pack_ids as pack_ids
from nebula_jax.communication.codecs.packing import pack_tokens as pack_tokens
from nebula_jax.communication.codecs.parser import NAMES as NAMES
from nebula_jax.communication.codecs.parser import CodecError as CodecError
from nebula_jax.communication.codecs.parser import Compression as Compression
from nebula_jax.communication.codecs.parser import from_string as from_string
from nebula_jax.communication.codecs.rotations import hadamard as hadamard
from nebula_jax.communication.codecs.sparse import top_k as top_k
from nebula_jax.communication.codecs.wrappers import error_feedback as error_feedback
from nebula_jax.communication.codecs.wrappers import from_step as from_step
from nebula_jax.communication.selector import chain as chain
