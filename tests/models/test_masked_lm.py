import dataclasses

import jax
import numpy as np
import pytest
import two_halves

from nebula_jax.models import adapters, mask_slots, masked_lm, transformer

CONFIG = transformer.Config(
    vocab_size=50, layers=2, width=16, heads=2, feed_forward=32, max_length=12
)
B, L = 3, CONFIG.max_length
IDS = np.random.RandomState(0).randint(5, 50, (B, L)).astype(np.int32)
MASK = np.arange(L)[None] < np.array([[12], [9], [5]])
PLACES = np.array([[1, 4, 8], [0, 3, L], [2, L, L]], np.int32)


def apply(model, params, *inputs, **named):
    return jax.jit(lambda: model.apply({"params": params}, *inputs, **named))()


@pytest.fixture(scope="module")
def generator():
    """Made with numpy: to compile a model's own `init` takes seconds."""
    return two_halves.init_of(masked_lm.MaskedLM(CONFIG), IDS, MASK, PLACES)


def test_new_adapters_change_nothing(generator):
    model = masked_lm.MaskedLM(CONFIG, adapter_dim=4)
    init = jax.jit(lambda: model.init(jax.random.key(0), IDS, MASK, PLACES)["params"])
    params = init()
    assert params.keys() - generator.keys() == {"adapter_0", "adapter_1"}
    want = apply(masked_lm.MaskedLM(CONFIG), generator, IDS, MASK, PLACES)
    got = apply(model, params | generator, IDS, MASK, PLACES)
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_an_adapter_stands_after_each_layer(generator):
    """By hand: embeddings, then block and adapter in turn, then the head."""
    model = masked_lm.MaskedLM(CONFIG, adapter_dim=4)
    random = np.random.RandomState(1)
    params = two_halves.init_of(model, IDS, MASK, PLACES) | generator
    for layer in range(CONFIG.layers):
        kernel = random.randn(4, 16).astype(np.float32)
        params[f"adapter_{layer}"]["up"]["kernel"] = kernel
    embeddings = transformer.Embeddings(CONFIG)
    hidden = apply(embeddings, params["embeddings"], IDS, True)
    for layer in range(CONFIG.layers):
        block = params["encoder"][f"layer_{layer}"]
        hidden = apply(transformer.Block(CONFIG), block, hidden, MASK, True)
        adapter = adapters.EncoderAdapter(CONFIG, 4, 0.0)
        hidden = apply(adapter, params[f"adapter_{layer}"], hidden)
    rest = masked_lm.MaskedLM(dataclasses.replace(CONFIG, layers=0)).bind(
        {"params": generator}
    )
    hidden = mask_slots.gather(hidden, PLACES)
    want = rest.mlm_head(hidden, rest.embeddings.table)
    got = apply(model, params, IDS, MASK, PLACES)
    np.testing.assert_allclose(got, want, atol=1e-5)
