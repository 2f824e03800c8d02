import numpy as np

from nebula_jax.communication import codec, codecs, selector

X = np.arange(12, dtype=np.float32).reshape(3, 4)


def counting(factor):
    """Multiplies by a factor; counts tensors, from ten times that on."""
    return codec.Codec(
        init=lambda spec: 10 * factor,
        encode=lambda x, count: (x * factor, count + 1),
        decode=lambda x, count: (x / factor, count + 1),
    )


def by_sign():
    """As it is, or halved if the first value is negative; counts tensors."""
    options = counting(1), counting(0.5)
    return selector.Selector(options, lambda x, n, step: int(x.reshape(-1)[0] < 0))


def test_a_choice_is_made_by_what_is_sent_and_state_is_shared():
    chosen = by_sign()
    state = chosen.init(X)
    for number, x in enumerate((X + 1, -X - 1, X + 1)):
        payload, state = chosen.encode(x, state)
        assert (payload.option, state) == (number % 2, number + 11)
        np.testing.assert_array_equal(chosen.decode(payload, 0)[0], x)


def test_a_chain_keeps_a_state_of_the_later_codec_for_each_option():
    chained = selector.chain(by_sign(), counting(4))
    state = chained.init(X)
    for x in (X + 1, -X - 1, X + 1):
        payload, state = chained.encode(x, state)
        got, _ = chained.decode(payload, chained.init(X))
        np.testing.assert_array_equal(got, x)
    first, later = state
    assert first == 13
    assert later == (42, 41)


def test_an_empty_chain_is_identity():
    assert codec.chain() == codecs.chain() == codec.identity()
    np.testing.assert_array_equal(codec.chain().encode(X, ())[0], X)


def test_a_chains_state_is_the_tuple_of_its_codecs_states():
    chained = codec.chain(counting(1), counting(2), counting(4))
    state = chained.init(X)
    assert state == (10, 20, 40)
    payload, state = chained.encode(X, state)
    np.testing.assert_array_equal(payload, 8 * X)
    assert state == (11, 21, 41)
    got, state = chained.decode(payload, state)
    np.testing.assert_array_equal(got, X)
    assert state == (12, 22, 42)
