"""The codecs by name: `codecs.svd(0.6)` here, `svd(0.6)` in a flag."""

from nebula_jax.communication.codec import chain as chain
from nebula_jax.communication.codec import identity as identity
from nebula_jax.communication.codecs.exact import bits_for as bits_for
from nebula_jax.communication.codecs.exact import pack_ids as pack_ids
