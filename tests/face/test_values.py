"""Any pytree of a user's goes into a checkpoint, and comes back as it was."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import nebula_jax as nebula
from nebula_jax.face import values


def came_back(tree):
    return values.restored(tree, values.arrays(tree))


def test_arrays_keys_and_numbers_come_back_as_they_were():
    tree = {
        "array": jnp.arange(3, dtype=jnp.bfloat16),
        "host": np.arange(4, dtype=np.int64),
        "key": jax.random.key(7),
        "numbers": (3, 2.5, True),
        "nothing": None,
    }
    found = came_back(tree)
    np.testing.assert_array_equal(found["array"], tree["array"])
    np.testing.assert_array_equal(found["host"], tree["host"])
    assert type(found["host"]) is np.ndarray
    assert jax.random.bits(found["key"]) == jax.random.bits(tree["key"])
    assert found["numbers"] == (3, 2.5, True)
    assert [type(each) for each in found["numbers"]] == [int, float, bool]


def test_a_state_of_nnx_comes_back():
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    state = nebula.state(nnx.state(model), optax.adamw(1e-3))
    found = came_back((state, 5))
    assert jax.tree.structure(found) == jax.tree.structure((state, 5))


@dataclasses.dataclass
class Iterator:
    position: int = 0


def test_what_no_checkpoint_can_have_is_named_with_its_place():
    with pytest.raises(values.ValueUnsaved, match="0/data is of type Iterator"):
        values.arrays(({"data": Iterator()},))
    with pytest.raises(values.ValueUnsaved, match="0/name is of type str"):
        values.arrays(({"name": "front"},))
