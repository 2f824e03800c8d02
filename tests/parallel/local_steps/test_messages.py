"""Codecs of the messages of local steps."""

import jax
import jax.numpy as jnp
import pytest

from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication import codecs
from nebula_jax.parallel.local_steps import messages


def test_a_codec_whose_receiver_remembers_is_refused():
    messages.check_codec(codecs.int8("row", "stochastic"))
    messages.check_codec(codecs.from_string("error_feedback(top_k(0.1)|fp16)").codec)
    with pytest.raises(ValueError, match="its receiver remembers what came before"):
        messages.check_codec(remembering())


def remembering() -> codec_lib.Codec:
    """Returns a codec that sends the difference from what it sent before."""

    def init(spec):
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), spec)

    def encode(arrays, state):
        return jax.tree.map(jnp.subtract, arrays, state), arrays

    def decode(payload, state):
        arrays = jax.tree.map(jnp.add, payload, state)
        return arrays, arrays

    return codec_lib.Codec(init, encode, decode, "remembering")
