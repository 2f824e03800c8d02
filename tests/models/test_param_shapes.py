import jax
import jax.numpy as jnp
import pytest

from nebula_jax import errors
from nebula_jax.models import param_shapes

TREE = {"a": {"kernel": jnp.zeros((2, 3)), "bias": jnp.zeros(3)}, "b": jnp.zeros(())}


def check(found):
    param_shapes.check(found, TREE, "checkpoint", "the model")


def test_trees_of_the_same_shapes_agree():
    check(TREE)
    check(jax.eval_shape(lambda: TREE))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"b": jnp.zeros(1)}, r"checkpoint: b is \(1,\); the model has \(\)"),
        ({"a": {"bias": jnp.zeros(3)}}, r"a/kernel is missing; the model has \(2, 3\)"),
        ({"c": jnp.zeros(2)}, r"c is \(2,\); the model has no such parameter"),
    ],
)
def test_the_first_difference_is_named(change, words):
    with pytest.raises(errors.NebulaError, match=words):
        check(TREE | change)
