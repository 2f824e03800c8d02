import drawn
import jax
import numpy as np

from nebula_jax.models import adapters, mask_slots, masked_lm, transformer

CONFIG = transformer.Config(
    vocab_size=50, layers=2, width=16, heads=2, feed_forward=32, max_length=12
)
MODEL = masked_lm.MaskedLM(CONFIG, adapter_dim=4)
B, L = 3, CONFIG.max_length
IDS = np.random.RandomState(0).randint(5, 50, (B, L)).astype(np.int32)
MASK = np.arange(L)[None] < np.array([[12], [9], [5]])
PLACES = np.array([[1, 4, 8], [0, 3, L], [2, L, L]], np.int32)


def test_new_adapters_change_nothing():
    """What they add to the hidden states (eq. 12) begins at zero."""

    @jax.jit  # which leaves out what is not returned
    def init():
        params = MODEL.init(jax.random.key(0), IDS, MASK, PLACES)["params"]
        return params["adapter_0"], params["adapter_1"]

    for adapter in init():
        assert not adapter["up"]["kernel"].any()
        assert adapter["down"]["kernel"].any()


def test_an_adapter_stands_after_each_layer():
    """By hand: embeddings, then block and adapter in turn, then the head."""

    @jax.jit
    def by_hand(params):
        embeddings = {"params": params["embeddings"]}
        hidden = transformer.Embeddings(CONFIG).apply(embeddings, IDS, True)
        for layer in range(CONFIG.layers):
            block = {"params": params["encoder"][f"layer_{layer}"]}
            hidden = transformer.Block(CONFIG).apply(block, hidden, MASK, True)
            adapter = {"params": params[f"adapter_{layer}"]}
            hidden = adapters.EncoderAdapter(CONFIG, 4).apply(adapter, hidden)
        hidden = mask_slots.gather(hidden, PLACES)
        table = params["embeddings"]["word_embeddings"]["embedding"]
        head = {"params": params["mlm_head"]}
        return masked_lm.MLMHead(CONFIG).apply(head, hidden, table)

    params = drawn.params(MODEL, IDS, MASK, PLACES)
    got = jax.jit(MODEL.apply)({"params": params}, IDS, MASK, PLACES)
    np.testing.assert_allclose(got, by_hand(params), atol=1e-5)
