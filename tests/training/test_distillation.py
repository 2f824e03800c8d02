"""A student's loss and its teachers' weights, against what the formulas say."""

import drawn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import trees

from nebula_jax.models import transformer
from nebula_jax.training import bert, distillation, masking

B, M, V = 2, 3, 11


def logits(seed):
    return jax.random.normal(jax.random.key(seed), (B, M, V)) * 2


def answer_of(values, count):
    largest, pieces = jax.lax.top_k(jax.nn.log_softmax(values), count)
    return distillation.Answer(pieces, largest)


def test_all_pieces_of_an_answer_are_a_cross_entropy_and_few_have_its_gradient():
    """Of the pieces that are not named, the student's are to weigh as much together."""
    student, teacher = logits(0), logits(1)
    target = jax.nn.softmax(teacher)
    wanted = -jnp.sum(target * jax.nn.log_softmax(student), axis=-1)
    found = distillation.imitation(student, answer_of(teacher, V))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)

    few = answer_of(teacher, 4)
    gradient = jax.grad(lambda x: distillation.imitation(x, few).sum())(student)
    named = jax.nn.one_hot(few.pieces, V).sum(-2)
    own = jax.nn.softmax(student)
    np.testing.assert_allclose(gradient * named, (own - target) * named, atol=1e-5)
    rest = 1 - (target * named).sum(-1)
    others = own * (1 - named)
    spread = others / others.sum(-1, keepdims=True) * rest[..., None]
    np.testing.assert_allclose(gradient * (1 - named), others - spread, atol=1e-5)


def test_an_answer_that_was_rounded_up_is_a_distribution_still():
    rounded = distillation.Answer(
        jnp.zeros((1, 1, 3), jnp.int32), jnp.array([[[0.5, -0.1, -40.0]]])
    )
    likely, rest = distillation.probabilities(rounded)
    assert float(likely.sum() + rest.sum()) == pytest.approx(1.0)
    assert float(rest.min()) == 0.0


def test_what_was_not_named_is_as_likely_as_any_other():
    answered = answer_of(logits(1), 4)
    everything = jnp.broadcast_to(jnp.arange(V), (B, M, V))
    found = [distillation.likelihood(answered, everything[..., v], V) for v in range(V)]
    np.testing.assert_allclose(jnp.sum(jnp.stack(found), axis=0), 1.0, rtol=1e-5)


SHAPE = transformer.Config(V, 1, 8, 2, 16, 8, dropout=0.0)
MODEL = bert.Config(SHAPE, steps=4)
CONFIG = distillation.Config(MODEL, share=0.0, weight_rate=0.5)


def batch():
    ids = jax.random.randint(jax.random.key(3), (B, 8), 5, V)
    return distillation.masked(MODEL, jax.random.key(0), 1, ids)


def test_learned_weights_are_those_that_make_the_text_most_likely():
    """The likelihood of two teachers' mixture has one maximum, found here by search.
    The one who knows the text, but not all of it, gets most of the weight; who is sure
    of one piece is as easy to imitate, and gets little."""
    student, (rows, _) = drawn.masked_language_model(SHAPE), batch()
    shape = (*rows.originals.shape, V)
    right = jax.nn.one_hot(rows.originals, V) * 3
    right = right.at[0].set(jax.random.normal(jax.random.key(5), shape[1:]) * 3)
    answers = [answer_of(right, 4), answer_of(jnp.zeros(shape).at[..., 7].set(9.0), 4)]
    scores = jnp.zeros(2)
    for _ in range(200):
        _, scores, metrics = distillation.gradients(
            CONFIG, student, scores, rows, answers, jax.random.key(0)
        )
    each = [distillation.likelihood(one, rows.originals, V) for one in answers]
    one, other, is_masked = jax.device_get((*each, rows.positions < 8))
    one, other = one[is_masked], other[is_masked]
    shares = np.linspace(0.001, 0.999, 999)[:, None]
    found = np.log(shares * one + (1 - shares) * other).sum(axis=1)
    best = shares[np.argmax(found), 0]
    assert 0.5 < best < 1
    assert float(metrics["weight_0"]) == pytest.approx(best, abs=0.01)


def test_without_a_share_of_the_teachers_it_is_masked_language_modeling():
    rows, asked = batch()
    np.testing.assert_array_equal(asked.is_masked.sum(-1), (rows.positions < 8).sum(-1))
    slots, student = masking.capacity(0.15, 8), drawn.masked_language_model(SHAPE)
    answered = distillation.answer(SHAPE, slots, 4, student, asked)
    grads, scores, metrics = distillation.gradients(
        CONFIG, student, jnp.zeros(2), rows, [answered] * 2, jax.random.key(0)
    )
    part = bert.loss_of(MODEL, None, (rows.positions < 8).sum() * 1.0, {})
    oracle = jax.jit(jax.value_and_grad(lambda own: part(own, rows, None).loss))
    loss, wanted = oracle(student)
    assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-5)
    trees.assert_close(grads, wanted, atol=1e-5)
    np.testing.assert_allclose(scores, 0, atol=1e-6)  # of teachers that are alike
