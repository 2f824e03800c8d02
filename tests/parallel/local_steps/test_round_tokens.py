"""The tokens that messages report: each is in one round, or comes back in part."""

import jax.numpy as jnp
import pytest

from nebula_jax.parallel.local_steps import round_tokens


def test_a_message_takes_along_what_its_fragment_has():
    tokens = round_tokens.Tokens([5, 0])
    tokens.took(jnp.asarray(2))
    tokens.took(jnp.asarray(3))
    assert tokens.send(0) == 10
    tokens.took(jnp.asarray(4))
    assert tokens.counts() == [4, 9]
    tokens.close(0, is_in=True, kept=0.5)
    assert tokens.counts() == [4, 9]


@pytest.mark.parametrize(("kept", "left"), [(1.0, 14), (0.5, 7), (0.0, 0)])
@pytest.mark.parametrize("is_sent", [True, False])
def test_those_of_a_round_without_it_come_back(kept, left, is_sent):
    tokens = round_tokens.Tokens([10, 20])
    if is_sent:
        tokens.send(0)
    tokens.took(jnp.asarray(4))
    tokens.close(0, is_in=False, kept=kept)
    assert tokens.counts() == [left, 24]


def test_the_counts_are_a_copy():
    tokens = round_tokens.Tokens([1])
    tokens.counts()[0] = 9
    assert tokens.counts() == [1]
