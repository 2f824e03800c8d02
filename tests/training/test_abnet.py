"""Both sides of ABNet against the uncut model and the whole batch."""

import functools

import drawn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import trees
from token_rows import CONTROLS, PAD, rows

from nebula_jax.models import abnet, transformer
from nebula_jax.training import abnet as training
from nebula_jax.training import losses, masking

B = 4
INDEX = np.asarray([7, 1, 9, 4], np.int32)
SOURCE_LENGTHS, TARGET_LENGTHS = (6, 9, 4, 12), (8, 5, 12, 3)
SOURCE_IDS = rows(SOURCE_LENGTHS, 16)
TARGET_IDS = rows(TARGET_LENGTHS, 16, 1)


def task(objective, dropout=0.1):
    source = transformer.Config(60, 1, 16, 2, 32, 16, dropout)
    target = transformer.Config(60, 1, 24, 2, 48, 16, dropout)
    shape = abnet.Config(source, target, objective, 8, 8, 2, dropout, 16)
    return training.Task(shape, CONTROLS, CONTROLS, has_dropout=dropout > 0)


@functools.cache
def init(objective):
    """Parameters of both sides."""
    shape = task(objective).config
    ids, hidden = SOURCE_IDS[:1], np.zeros((1, 16, 16), np.float32)
    return (
        drawn.params(abnet.Source(shape), ids, ids != PAD),
        drawn.params(abnet.Target(shape), ids, ids != PAD, hidden, ids != PAD, seed=1),
    )


def batches(objective, of=slice(None), widths=(12, 12)):
    """What each side has of some of the rows, tokens counted over all of them."""
    tokens = np.float32(sum(TARGET_LENGTHS))
    told = objective == "cmlm"
    lengths = np.asarray(TARGET_LENGTHS, np.int32) * told
    source = training.SourceBatch(
        SOURCE_IDS[of, : widths[0]],
        INDEX[of],
        lengths[of],
        tokens if told else np.float32(1),
    )
    room = np.zeros(B * widths[1], np.int8)
    return source, training.TargetBatch(
        TARGET_IDS[of, : widths[1]], INDEX[of], tokens, room
    )


@functools.partial(jax.jit, static_argnums=0)
def uncut(task, params, both):
    """Loss, metrics, and gradients of both sides, nothing between them."""

    def loss(params):
        hidden, own = front(task, params[0], both[0])
        far, metrics = back(task, params[1], hidden, both[1])
        return own + far, metrics | {"own": own}

    (value, metrics), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return value, metrics, grads


@functools.partial(jax.jit, static_argnums=0)
def front(task, params, batch):
    return training.front(task, params, (batch, jax.random.key(2)))


@functools.partial(jax.jit, static_argnums=0)
def back(task, params, hidden, batch):
    return training.back(task, params, hidden, (batch, jax.random.key(3)))


encode = jax.jit(abnet.encode, static_argnums=0)


@functools.partial(jax.jit, static_argnums=0)
def all_logits(config, params, ids, hidden):
    """Computes the target's logits of all places."""
    rows = ids, ids != PAD, hidden["hidden"], hidden["mask"]
    return abnet.Target(config).apply({"params": params}, *rows)


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["cmlm", "ar"])
def test_micro_batches_add_up_to_the_whole_batch_and_may_be_padded_more(objective):
    """Loss, metrics and gradients. (Padding a row changes how dropout is drawn.)"""
    plain, params = task(objective, dropout=0.0), init(objective)
    whole = uncut(plain, params, batches(objective))
    parts = [
        uncut(plain, params, batches(objective, of, widths=(16, 16)))
        for of in (slice(0, 2), slice(2, 4))
    ]
    trees.assert_close(jax.tree.map(np.add, *parts), whole, atol=1e-5)
    assert whole[1]["dropped_targets"] == whole[1]["mismatched_examples"] == 0
    assert whole[1]["tokens"] == sum(TARGET_LENGTHS)


def test_dropout_is_the_examples_in_whatever_batch_it_stands():
    hidden, loss = told(slice(None))
    first, second = told(slice(0, 2)), told(slice(2, 4))
    both = np.concatenate([first[0]["hidden"], second[0]["hidden"]])
    np.testing.assert_allclose(both, hidden["hidden"], atol=1e-5)
    np.testing.assert_allclose(first[1] + second[1], loss, rtol=1e-5)
    plain, _ = front(task("cmlm", dropout=0.0), init("cmlm")[0], batches("cmlm")[0])
    assert not np.allclose(plain["hidden"], hidden["hidden"], atol=1e-2)


def told(of):
    """What the source says of some of the rows, and its own loss, with dropout."""
    source, _ = batches("cmlm", of)
    return front(task("cmlm"), init("cmlm")[0], source)


@pytest.mark.slow
def test_dropout_of_the_target_is_the_examples_too():
    """And so are its masks, whatever is behind each row."""
    params, told = init("cmlm")[1], hidden_states("cmlm")

    def loss(of):
        _, target = batches("cmlm", of)
        part = jax.tree.map(lambda leaf: leaf[of], told)
        return back(task("cmlm", dropout=0.5), params, part, target)[0]

    whole = loss(slice(None))
    parts = loss(slice(0, 2)) + loss(slice(2, 4))
    np.testing.assert_allclose(parts, whole, rtol=1e-5)
    plain = uncut(task("cmlm", dropout=0.0), init("cmlm"), batches("cmlm"))
    assert abs(plain[1]["loss"] - whole) > 1e-3


def test_the_length_loss_is_a_tenth_of_the_lengths_and_only_of_cmlm():
    plain, params = task("cmlm", dropout=0.0), init("cmlm")
    source, _ = batches("cmlm")
    hidden, loss = front(plain, params[0], source)
    mask = source.input_ids != PAD
    logits = encode(plain.config, params[0], source.input_ids, mask).length_logits
    each = -jax.nn.log_softmax(logits)[np.arange(B), source.lengths]
    np.testing.assert_allclose(loss, 0.1 * each.sum() / sum(TARGET_LENGTHS), rtol=1e-6)
    np.testing.assert_array_equal(hidden["mask"], mask)
    np.testing.assert_array_equal(hidden["index"], INDEX)
    _, loss = front(task("ar", dropout=0.0), init("ar")[0], batches("ar")[0])
    assert loss == 0


def test_the_translation_loss_is_that_of_the_answers_that_have_room():
    """`ar`, where all but [CLS] is asked, against the loss of all places."""
    plain, params, room = task("ar", dropout=0.0), init("ar"), 20
    source, target = batches("ar")
    source = source._replace(example_ids=INDEX[::-1].copy())  # of other examples
    target = target._replace(slots=np.zeros(room, np.int8))
    hidden, _ = front(plain, params[0], source)
    loss, metrics = back(plain, params[1], hidden, target)
    ids = target.target_ids
    logits = all_logits(plain.config, params[1], ids[:, :-1], hidden)
    asked = ids[:, 1:] != PAD
    asked &= np.cumsum(asked).reshape(asked.shape) <= room
    total = losses.label_smoothed_cross_entropy(
        logits, ids[:, 1:], asked.astype(jnp.float32), plain.smoothing
    )
    np.testing.assert_allclose(loss, total / sum(TARGET_LENGTHS), rtol=1e-5)
    assert metrics["predicted"] == room
    hits = asked & (np.argmax(logits, axis=-1) == ids[:, 1:])
    assert metrics["correct"] == hits.sum()
    assert metrics["dropped_targets"] == sum(TARGET_LENGTHS) - B - room
    assert metrics["mismatched_examples"] == B


def test_a_corrupted_source_is_masked_in_text_alone():
    noisy = task("ar", dropout=0.0)._replace(source_corruption=0.3)
    params = init("ar")
    clean, other = (
        front(each, params[0], batches("ar")[0])[0]
        for each in (task("ar", dropout=0.0), noisy)
    )
    np.testing.assert_array_equal(clean["mask"], other["mask"])
    assert not np.allclose(clean["hidden"], other["hidden"])


held_out = jax.jit(training.held_out, static_argnums=0)


def hidden_states(objective):
    """Hidden states as they come after training: without dropout."""
    plain = task(objective, dropout=0.0)
    return front(plain, init(objective)[0], batches(objective)[0])[0]


def log_probs(objective, input_ids):
    """What the uncut target model predicts everywhere."""
    hidden, shape = hidden_states(objective), task(objective, dropout=0.0).config
    logits = all_logits(shape, init(objective)[1], input_ids, hidden)
    return np.asarray(jax.nn.log_softmax(logits))


def test_the_loss_of_a_held_out_sentence_is_that_of_its_tokens_from_those_before():
    """`ar`, against the uncut model; dropout and smoothing have no part in it."""
    noisy, params = task("ar", dropout=0.5)._replace(smoothing=0.3), init("ar")
    ids = TARGET_IDS[:, :12]
    nats, tokens = held_out(noisy, params[1], hidden_states("ar"), ids)
    want = log_probs("ar", ids[:, :-1])
    for row, length in enumerate(TARGET_LENGTHS):
        each = [want[row, q, ids[row, q + 1]] for q in range(length - 1)]
        assert tokens[row] == len(each)
        np.testing.assert_allclose(nats[row], -sum(each), rtol=1e-5)


def test_the_loss_of_a_held_out_sentence_is_that_of_masked_pieces():
    """`cmlm`: the places follow from an example's number, and all are [MASK]."""
    plain, params = task("cmlm", dropout=0.0), init("cmlm")
    ids = TARGET_IDS[:, :12]
    nats, tokens = held_out(plain, params[1], hidden_states("cmlm"), ids)
    keys = masking.example_keys(
        jax.random.key(training.HELD_OUT_SEED), jnp.asarray(INDEX)
    )
    places = masking.mask_random_count(keys, ids, CONTROLS)[1]
    want = log_probs("cmlm", np.where(places, CONTROLS.mask, ids))
    for row, chosen in enumerate(np.asarray(places)):
        each = [want[row, q, ids[row, q]] for q in np.flatnonzero(chosen)]
        assert 1 <= tokens[row] == len(each) <= TARGET_LENGTHS[row] - 2
        np.testing.assert_allclose(nats[row], -sum(each), rtol=1e-5)
