"""Trained and frozen parameters of trees of every kind, apart and together again."""

import collections
import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from nebula_jax.training import partition


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    kernel: np.ndarray
    bias: np.ndarray | None


Pair = collections.namedtuple("Pair", "first second")


def w(size):
    return np.arange(size, dtype=np.float32)


def block(rngs):
    return nnx.Sequential(nnx.Linear(2, 3, rngs=rngs), nnx.BatchNorm(3, rngs=rngs))


TREES = {
    "nested dicts": {"a/b": {"w": w(2)}, "c": {"w": w(3), "b": w(1)}, "d": {"w": w(1)}},
    "list of tuples": [(w(2), w(3)), (w(4), w(5)), ()],
    "int keys": {0: {"w": w(2)}, 1: {"w": w(3)}, 10: w(1)},
    "dataclasses": {"in": Layer(w(2), None), "out": [Layer(w(3), w(4))]},
    "named tuple": Pair(w(2), Pair({"w": w(3)}, w(1))),
    "ordered dict": collections.OrderedDict(z=w(1), a={"w": w(2)}),
    "bare array": w(3),
    "no bias, no layer": {"w": w(2), "b": None, "rest": {}, "more": [None, {}]},
    "nothing": {},
    "nnx.State": nnx.state(block(nnx.Rngs(0))),
    "nnx module": block(nnx.Rngs(0)),
}


@pytest.mark.parametrize("of_path", ["all", "none", "every other"])
@pytest.mark.parametrize("name", TREES)
def test_what_is_split_comes_together_again(name, of_path):
    tree, seen = TREES[name], []

    def is_trained(path):
        seen.append(path)
        return {"all": True, "none": False, "every other": len(seen) % 2}[of_path]

    trained, frozen = partition.split(tree, is_trained)
    merged = partition.merge(trained, frozen)
    assert jax.tree.structure(merged) == jax.tree.structure(tree)
    leaves = jax.tree.leaves(tree)
    for got, want in zip(jax.tree.leaves(merged), leaves, strict=True):
        assert got is want
    count = {"all": len(leaves), "none": 0, "every other": (len(leaves) + 1) // 2}
    assert len(jax.tree.leaves(trained)) == count[of_path]
    assert len(seen) == len(leaves) == len(set(seen))


def test_dicts_leave_out_what_is_in_the_other_part():
    """The structure that checkpoints of frozen models have."""
    params = TREES["nested dicts"]
    trained, frozen = partition.split(params, lambda path: path in ("a/b/w", "c/b"))
    assert trained == {"a/b": {"w": params["a/b"]["w"]}, "c": {"b": params["c"]["b"]}}
    assert frozen == {"c": {"w": params["c"]["w"]}, "d": {"w": params["d"]["w"]}}


def test_paths_are_keys_places_and_fields():
    seen = []
    tree = {"in": [Layer(w(1), w(1))], 3: Pair(w(1), w(1))}
    tree = {"all": tree["in"], "rest": {3: tree[3]}}
    partition.split(tree, seen.append)
    want = ["all/0/kernel", "all/0/bias", "rest/3/first", "rest/3/second"]
    assert seen == want


def test_integers_and_keys_are_frozen_in_any_case():
    params = {"ids": np.arange(3), "key": jax.random.key(0), "w": w(1)}
    trained, frozen = partition.split(params, partition.train_all)
    assert trained.keys() == {"w"}
    assert frozen.keys() == {"ids", "key"}


def test_parts_that_do_not_fit_together_are_an_error():
    with pytest.raises(ValueError, match="a parameter is in both parts"):
        partition.merge({"w": w(1)}, {"w": w(1)})
    with pytest.raises(ValueError, match="different lengths of list"):
        partition.merge([w(1), None], [None])
