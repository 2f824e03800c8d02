import drawn
import jax
import numpy as np
import pytest
import token_rows
import trees
from token_rows import CONTROLS

from nebula_jax.models import abnet, transformer
from nebula_jax.models.pretrained import tree
from nebula_jax.training import abnet as training
from nebula_jax.training import optimizers
from nebula_jax.training import state as train_state

CONFIG = transformer.Config(60, 1, 16, 2, 32, 16)
OPTIMIZER = optimizers.adam(lambda step: 5e-2)


def rows(width=12):
    return token_rows.rows((8, 5, 12, 3), width)


@jax.jit
def begin():
    head = training.init_head(CONFIG, jax.random.key(2))
    return train_state.create(head, OPTIMIZER, jax.random.key(3))


def step(state, objective, ids, slots=48):
    """One step: the next state and the loss; the state before it is used up."""
    encoder = drawn.masked_language_model(CONFIG)
    state, metrics = training.head_step(
        CONFIG, CONTROLS, objective, slots, OPTIMIZER, state, encoder, ids
    )
    return state, metrics["loss"]


def test_the_head_is_one_that_a_checkpoint_has():
    shapes = tree.shapes(CONFIG)
    head = begin().params
    for path, leaf in jax.tree_util.tree_leaves_with_path(head):
        name = "/".join(key.key for key in path)
        assert leaf.shape == shapes[f"mlm_head/{name}"]


@pytest.mark.parametrize("objective", abnet.OBJECTIVES)
def test_a_head_learns_to_say_its_text(objective):
    """An untrained encoder, of which a head still learns which pieces are common."""
    state, first = step(begin(), objective, rows())
    np.testing.assert_allclose(first, np.log(60), atol=0.3)
    for _ in range(30):
        state, last = step(state, objective, rows())
    assert last < 0.7 * first
    assert state.step == 31


def test_padding_and_spare_room_change_nothing():
    want, loss = step(begin(), "ar", rows())
    got, other = step(begin(), "ar", rows(16), slots=60)
    np.testing.assert_allclose(loss, other, rtol=1e-5)
    trees.assert_close(got.opt_state, want.opt_state, atol=1e-5)


def test_the_next_piece_is_said_without_having_read_it():
    """The first loss of a row's start does not depend on what comes later."""
    ids = rows()[:1, :6]
    other = ids.copy()
    other[0, 4:] = [17, 18]
    # Three places are asked: after [CLS] and the first two pieces.
    losses = [step(begin(), "ar", each, slots=3)[1] for each in (ids, other)]
    np.testing.assert_allclose(*losses, rtol=1e-6)
