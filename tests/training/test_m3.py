import dataclasses
import functools

import jax
import numpy as np
import pytest
import trees

from nebula_jax.communication import codec, codecs
from nebula_jax.data.tokenizers import vocabulary as vocabularies
from nebula_jax.models import mask_slots, masked_lm, modern, transformer
from nebula_jax.training import (
    accumulate,
    losses,
    m3,
    m3_predictions,
    m3_steps,
    masking,
    warm_start,
)

V, L, B = 97, 24, 8


GENERATOR = transformer.Config(
    vocab_size=V,
    layers=1,
    width=32,
    heads=4,
    feed_forward=64,
    max_length=L,
    dropout=0.1,
)
DISCRIMINATOR = dataclasses.replace(GENERATOR, body=modern.Body())  # one of each kind
CONFIG = m3.Config(
    GENERATOR, DISCRIMINATOR, steps=20, learning_rate=1e-3, warmup_steps=2
)
PLAIN = m3.Config(
    generator=dataclasses.replace(GENERATOR, dropout=0.0),
    discriminator=dataclasses.replace(DISCRIMINATOR, dropout=0.0),
    steps=150,
    learning_rate=2e-3,
    warmup_steps=20,
)
WEIGHTED = dataclasses.replace(PLAIN, rtd_weight=7.0, clm_weight=3.0)

# Jitted once for all tests: most of their time is compilation. All configurations but
# WARM begin with the states of CONFIG.
init_generator = jax.jit(m3.init_generator, static_argnums=0)
init_discriminator = jax.jit(m3.init_discriminator, static_argnums=0)
generator_step = jax.jit(m3_steps.generator_step, static_argnums=0)
discriminator_step = jax.jit(m3_steps.discriminator_step, static_argnums=0)
discriminator_loss = jax.jit(m3.discriminator_loss, static_argnums=0)
predict = jax.jit(m3_predictions.predict, static_argnums=0)
mask_tokens = jax.jit(
    functools.partial(
        masking.mask_tokens,
        rate=PLAIN.mask_rate,
        policy=masking.POLICIES[PLAIN.mask_policy],
        vocab_size=V,
    )
)


def text(seed):
    random = np.random.RandomState(seed)
    ids = random.randint(vocabularies.NUM_SPECIAL, V, (B, L)).astype(np.int32)
    ids[:, 0], ids[:, -5], ids[:, -4:] = (
        vocabularies.SPECIAL.cls,
        vocabularies.SPECIAL.sep,
        vocabularies.SPECIAL.pad,
    )
    return ids


@pytest.fixture(scope="module")
def generator():
    return init_generator(CONFIG, 0, 0)


@pytest.fixture(scope="module")
def discriminator():
    return init_discriminator(CONFIG, 0)


@jax.jit
def corrupt(params, key, ids, temperature):
    config = dataclasses.replace(CONFIG, temperature=temperature)
    return m3_predictions.corrupt(config, params, key, ids)


def corrupted(generator, seed=0, temperature=1.0):
    return corrupt(generator.params, jax.random.key(seed), text(seed), temperature)


@jax.jit
def logits_of(params, masked, ids):
    """Computes a generator's logits at masked positions of text."""
    return masked_lm.MaskedLM(PLAIN.generator).apply(
        {"params": params},
        masked.input_ids,
        ids != vocabularies.SPECIAL.pad,
        masked.positions,
    )


def test_a_cold_generator_says_its_best_word_and_a_hot_one_guesses(generator):
    """Temperature of the samples: towards 0 the argmax, far above 1 uniform."""

    ids = text(0)
    masked = mask_tokens(jax.random.split(jax.random.key(0), 3)[0], ids)
    best = np.argmax(logits_of(generator.params, masked, ids), -1)
    filled = np.asarray(masked.positions) < L

    def right(temperature):
        tokens = corrupted(generator, temperature=temperature)
        sampled = mask_slots.gather(tokens.input_ids, masked.positions)
        return np.mean((np.asarray(sampled) == best)[filled])

    assert right(1e-6) == 1
    assert right(1e6) < 0.5


WARM = dataclasses.replace(
    PLAIN,
    **{"steps": 20, "learning_rate": 1e-3, "warmup_steps": 2},
    start=warm_start.Config(
        head_warmup_steps=2,
        head_learning_rate=2e-3,
        layer_decay=0.8,
        freeze_embeddings=True,
        head_priors=True,
    ),
)


@pytest.mark.parametrize(
    "config",
    [CONFIG, pytest.param(WARM, marks=pytest.mark.slow)],  # both take long to compile
    ids=["cold", "warm"],
)
def test_the_split_run_equals_the_whole_model(config):
    """Two generators and a discriminator that exchange packed bytes, against one
    gradient of eq. 11 in all parameters: equal after 5 steps."""
    generators = [init_generator(config, 0, k) for k in range(2)]
    discriminator = first = init_discriminator(config, 0)
    whole = (tuple(generators), discriminator)
    pack = codecs.pack_ids(V)
    spec = m3.tokens_spec(config, B)
    encode, decode = jax.jit(pack.encode), jax.jit(pack.decode)
    whole_step = jax.jit(functools.partial(m3_steps.whole_step, config))
    for step in range(5):
        batches = [text(100 * k + step) for k in range(2)]
        received = []
        for k in range(2):
            generators[k], tokens, _ = generator_step(config, generators[k], batches[k])
            payload, _ = encode(tokens, pack.init(spec))
            received.append(decode(payload, ())[0])
        discriminator, metrics = discriminator_step(config, discriminator, received)
        *whole, tokens, of_generators, whole_metrics = whole_step(*whole, batches)
        trees.assert_same(tuple(received), tokens)
        assert len(of_generators) == 2
    split = ([state.params for state in generators], discriminator.params)
    uncut = ([state.params for state in whole[0]], whole[1].params)
    trees.assert_close(split, uncut, atol=1e-5)
    np.testing.assert_allclose(metrics["loss"], whole_metrics["loss"], rtol=1e-5)
    if config is WARM:
        tables = (each.params["embeddings"] for each in (discriminator, first))
        trees.assert_same(*tables)
        words = [each.opt_state.seen.words for each in (*generators, discriminator)]
        # Two steps' text, all of which the discriminator sees too.
        assert np.array_equal(words[0] + words[1], words[2])
        assert np.sum(words[0]) == sum(np.sum(text(step) >= 5) for step in range(2))


@functools.partial(jax.jit, static_argnums=2)
def lost(generator, discriminator, micro_batches):
    """The losses of both sides in micro-batches, and what a generator says beside."""
    rngs = m3.keys(generator.key())
    batch, weight = m3.mask(PLAIN, rngs.mask, text(0))
    part = m3.generator_loss_of(PLAIN, rngs, weight)
    one = accumulate.total(part, generator.params, batch, micro_batches)
    joined = m3_steps.join([corrupted(generator)] * 2)
    part, batch, _ = m3.discriminator_parts(PLAIN, discriminator.key(), joined)
    two = accumulate.total(part, discriminator.params, batch, micro_batches)
    return one.loss, one.rows.masked, one.rows.originals, two.loss, two.sums


def test_micro_batches_lose_what_the_batch_does(generator, discriminator):
    """Without dropout, whose bits are a micro-batch's own. Their gradients add up as
    those of any loss: test_accumulate.py."""
    found = [lost(generator, discriminator, count) for count in (1, 2)]
    # A loss of 40 nats has steps of 4e-6 in float32, and the order of the sum differs.
    trees.assert_close(*found, rtol=1e-6, atol=1e-5)


def test_corruption_is_eq_7(generator):
    tokens = jax.device_get(corrupted(generator))
    ids = text(0)
    np.testing.assert_array_equal(tokens.input_ids[~tokens.masked], ids[~tokens.masked])
    for row in range(B):
        originals = ids[row][tokens.masked[row]]
        np.testing.assert_array_equal(
            tokens.originals[row, : len(originals)], originals
        )
        assert not tokens.originals[row, len(originals) :].any()
    assert (tokens.input_ids != ids).any()


def test_a_sampled_gold_token_counts_as_original(discriminator):
    ids = text(0)
    masked = np.zeros((B, L), bool)
    masked[:, 3:5] = True
    originals = np.zeros((B, CONFIG.capacity), np.int32)
    originals[:, :2] = ids[:, 3:5]
    wrong = np.where(ids[:, 4] == 50, 51, 50)
    ids[:, 4] = wrong
    tokens = m3.Tokens(ids, masked, originals)
    predictions = predict(CONFIG, discriminator.params, tokens)
    expected = np.zeros((B, L), bool)
    expected[:, 4] = True
    np.testing.assert_array_equal(predictions.replaced, expected)
    assert predictions.sampled_correct == B
    assert predictions.masked == 2 * B


def test_a_generator_that_samples_padding_does_not_shorten_the_text(discriminator):
    ids = text(0)
    ids[:, 3] = vocabularies.SPECIAL.pad
    masked = np.zeros((B, L), bool)
    masked[:, 3] = True
    originals = np.zeros((B, CONFIG.capacity), np.int32)
    originals[:, 0] = text(0)[:, 3]
    tokens = m3.Tokens(ids, masked, originals)
    predictions = predict(CONFIG, discriminator.params, tokens)
    assert np.asarray(predictions.replaced)[:, 3].all()
    metrics = discriminator_loss(
        WEIGHTED, discriminator.params, jax.random.key(0), tokens
    )[1]
    assert metrics["tokens"] == B * (L - 4)


def test_the_discriminators_loss_is_lambda_rtd_plus_gamma_clm(generator, discriminator):
    tokens = corrupted(generator)
    loss, metrics = discriminator_loss(
        WEIGHTED, discriminator.params, jax.random.key(0), tokens
    )
    ids = text(0)
    positions = mask_slots.find(tokens.masked, WEIGHTED.capacity)
    apply = jax.jit(masked_lm.Discriminator(WEIGHTED.discriminator).apply)
    rtd, clm = apply(
        {"params": discriminator.params}, tokens.input_ids, ids != 0, positions
    )
    real = (ids != 0).astype(np.float32)
    want_rtd = losses.replaced_token_detection(rtd, tokens.input_ids == ids, real)
    want_rtd = losses.mean(want_rtd, real.sum())
    filled = (np.asarray(positions) < L).astype(np.float32)
    want_clm = losses.masked_cross_entropy(clm, tokens.originals, filled)
    want_clm = losses.mean(want_clm, filled.sum())
    np.testing.assert_allclose(metrics["rtd_loss"], want_rtd, rtol=1e-5)
    np.testing.assert_allclose(metrics["clm_loss"], want_clm, rtol=1e-5)
    np.testing.assert_allclose(loss, 7 * want_rtd + 3 * want_clm, rtol=1e-5)


def test_a_training_step_has_dropout(generator, discriminator):
    """Without it the same step, which draws the same masks, has another loss."""
    tokens = corrupted(generator)
    *_, one = generator_step(CONFIG, generator, text(0))
    _, two = discriminator_step(CONFIG, discriminator, [tokens] * 2)
    plain_one, *_, plain_two, _ = lost(generator, discriminator, 1)
    assert abs(one["loss"] - plain_one) > 1e-4
    assert abs(two["loss"] - plain_two) > 1e-4


def test_generators_start_different_and_share_nothing_with_the_discriminator():
    first, second = (init_generator(CONFIG, 0, k).params for k in range(2))
    discriminator = init_discriminator(CONFIG, 0).params
    tables = [
        tree["embeddings"]["word_embeddings"]["embedding"]
        for tree in (first, second, discriminator)
    ]
    assert not np.allclose(tables[0], tables[1])
    assert not np.allclose(tables[0], tables[2])


def test_steps_draw_fresh_masks_and_depend_on_step_and_seed_alone(generator):
    batch = text(0)
    one, first, _ = generator_step(CONFIG, generator, batch)
    _, again, _ = generator_step(CONFIG, generator, batch)
    _, second, _ = generator_step(CONFIG, one, batch)
    np.testing.assert_array_equal(first.masked, again.masked)
    assert (np.asarray(first.masked) != np.asarray(second.masked)).any()


def test_what_is_sent_is_the_formulas_size():
    """18 bits an id, one a mark, 18 an original: 22.7 Mbit for the paper's batch."""
    config = dataclasses.replace(
        CONFIG,
        generator=transformer.config_of_size(
            "base", vocab_size=250_002, max_length=512
        ),
    )
    spec = m3.tokens_spec(config, 2048)
    payload = codec.payload_spec(codecs.pack_ids(250_002), spec)
    tokens = 2048 * 512
    bits = tokens * (18 + 1) + 2048 * 79 * 18
    assert codec.nbytes(payload) == bits // 8
    assert bits / 1e6 == pytest.approx(22.8, abs=0.1)


def test_a_step_moves_nothing_between_host_and_device(generator, discriminator):
    """Once its state and its batch are there: what a loop pays for is in the loop."""
    batch = jax.device_put(text(0))

    def step(generator, discriminator):
        generator, tokens, _ = generator_step(CONFIG, generator, batch)
        received = [tokens, tokens]
        return generator, discriminator_step(CONFIG, discriminator, received)[0]

    state = step(generator, discriminator)
    with jax.transfer_guard("disallow"):
        state = step(*state)
    assert all(each.step == 2 for each in state)
