"""A student's loss, against what the formulas say."""

import drawn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import trees

from nebula_jax.models import masked_lm, transformer
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


SHAPE = transformer.Config(V, 1, 8, 2, 16, 8, dropout=0.0)
MODEL = bert.Config(SHAPE, steps=4)
CONFIG = distillation.Config(MODEL, share=0.0)


def batch():
    ids = jax.random.randint(jax.random.key(3), (B, 8), 5, V)
    return distillation.masked(MODEL, jax.random.key(0), 1, ids)


def test_without_a_share_of_the_teachers_it_is_masked_language_modeling():
    rows, asked = batch()
    np.testing.assert_array_equal(asked.is_masked.sum(-1), (rows.positions < 8).sum(-1))
    slots, student = masking.capacity(0.15, 8), drawn.masked_language_model(SHAPE)
    teachers = [drawn.masked_language_model(SHAPE, seed) for seed in range(2)]
    answers = [distillation.answer(SHAPE, slots, 4, each, asked) for each in teachers]
    grads, metrics = distillation.gradients(
        CONFIG, student, rows, answers, jax.random.key(0)
    )
    is_text, at = asked.input_ids != bert.PAD, rows.positions
    model = masked_lm.MaskedLM(SHAPE)
    own = jax.jit(model.apply)({"params": student}, asked.input_ids, is_text, at)
    each = [distillation.imitation(own, one)[at < 8].mean() for one in answers]
    assert each[0] != each[1]
    assert float(metrics["imitation"]) == pytest.approx(float(sum(each) / 2), rel=1e-5)
    part = bert.loss_of(MODEL, None, (rows.positions < 8).sum() * 1.0, {})
    oracle = jax.jit(jax.value_and_grad(lambda own: part(own, rows, None).loss))
    loss, wanted = oracle(student)
    assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-5)
    trees.assert_close(grads, wanted, atol=1e-5)
