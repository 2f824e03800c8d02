"""What a discriminator accepts of a generator."""

import jax
import numpy as np
import pytest

from experiments.m3 import channels
from nebula_jax.communication import loopback
from nebula_jax.communication.wire import session
from nebula_jax.models import transformer
from nebula_jax.training import m3

V, L, B = 97, 24, 4
MODEL = transformer.Config(
    vocab_size=V, layers=1, width=8, heads=2, feed_forward=16, max_length=L
)
CONFIG = m3.Config(MODEL, MODEL, steps=1)


@pytest.mark.parametrize(
    ("channel", "leaf", "value", "words"),
    [
        ("tokens", "input_ids", V, r"input_ids: 97 is not in \[0, 97\)"),
        ("held_out", "originals", 127, r"originals: 127 is not in \[0, 97\)"),
        ("held_out", "masked", True, "masked: 24 positions of a row; at most"),
    ],
)
def test_tokens_that_no_generator_makes_are_refused(channel, leaf, value, words):
    """One of its own make, which packs as ours does."""
    forth, back = loopback.ends()
    sender = getattr(channels.senders(forth, CONFIG, B, V), channel)
    receiver = getattr(channels.receivers(back, CONFIG, B, V), channel)
    spec = m3.tokens_spec(CONFIG, B)
    tokens = jax.tree.map(lambda each: np.zeros(each.shape, each.dtype), spec)
    sender.send(1, tokens)
    receiver.recv(1)
    getattr(tokens, leaf)[-1] = value
    sender.send(2, tokens)
    words = f"this process sent {channel} for step 2, micro-batch 0.*{words}"
    with pytest.raises(session.RemoteProtocolError, match=words):
        receiver.recv(2)
