"""Parameters parted by path: those that train, and those that are frozen.

Only trained parameters get gradients and an optimizer's moments. Parameters are any
pytree: nested dicts as Flax's, lists and tuples of arrays, dataclasses, an `nnx.State`,
a bare array.
"""

import sys
from collections.abc import Callable
from typing import Any

import jax

from nebula_jax import errors
from nebula_jax.communication import codec as codec_lib
from nebula_jax.communication.codecs import leaves

Params = Any  # pytree of arrays
IsTrained = Callable[[str], bool]
"""Path of a parameter, as in `encoder/layer_0/output/kernel` -> True if it trains.

Keys, places in a list and names of fields are joined with `/`: `layers/0/kernel`.
"""


def named(tree: Any) -> list[tuple[str, Any]]:
    """Returns the leaves of a tree with their paths, as in IsTrained."""
    found = jax.tree_util.tree_leaves_with_path(tree)
    return [(_joined(path), leaf) for path, leaf in found]


def map_named(fn: Callable[[str, Any], Any], tree: Any) -> Any:
    """Returns a tree with fn(path, leaf) in the place of each leaf."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: fn(_joined(path), leaf), tree
    )


def _joined(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def train_all(path: str) -> bool:
    """Returns True: every parameter trains."""
    return True


def split(params: Params, is_trained: IsTrained) -> tuple[Params, Params]:
    """Splits parameters into (trained, frozen); SettingsError at what is no array.

    What is in the other part is left out of a dict; elsewhere None is in its place.
    Integers are frozen in any case.
    """
    check(params)
    return _split(params, is_trained, ())


def check(params: Params) -> None:
    """Raises errors.SettingsError unless parameters are arrays, none NNX's generator.

    A dropout would draw the same mask in every call, as parameters come out of no step.
    """
    codec_lib.check_arrays("params", params)
    nnx = sys.modules.get("flax.nnx")  # who has not imported it has no generator of it
    kind = nnx.RngState if nnx is not None else ()

    def is_random(node: Any) -> bool:
        return isinstance(node, kind)

    found = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_random)
    for path, node in found:
        if is_random(node):
            raise errors.SettingsError(
                f"params{jax.tree_util.keystr(path)} is a generator of NNX, which would"
                " draw the same numbers in every step: split with nnx.Param, as"
                " graph, params = nnx.split(module, nnx.Param) of a module without"
                " rngs=, and pass rngs=nnx.Rngs(dropout=rng) in the call"
            )


def check_any_trains(frozen: Params) -> None:
    """Raises errors.SettingsError if parameters of which none trains could train."""
    paths = [path for path, leaf in named(frozen) if leaves.is_float(leaf)]
    if paths:
        raise errors.SettingsError(
            "is_trained is True for no floating-point array of params; it is given"
            f" paths such as {paths[0]}"
        )


def merge(trained: Params, frozen: Params) -> Params:
    """Inverts `split`; ValueError if a parameter is in both, or they do not fit."""
    if trained is None or frozen is None:
        return frozen if trained is None else trained
    if type(trained) is type(frozen) is dict:
        keys = trained | frozen
        return {key: merge(trained.get(key), frozen.get(key)) for key in keys}
    if jax.tree_util.all_leaves([trained]):
        raise ValueError("a parameter is in both parts, the trained and the frozen one")
    return jax.tree.map(
        merge, trained, frozen, is_leaf=lambda node: node is not trained
    )


def _split(tree: Any, is_trained: IsTrained, path: tuple) -> tuple[Any, Any]:
    below, structure = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: node is not tree
    )
    if any(child is tree for _, child in below):
        trains = leaves.is_float(tree) and is_trained(_joined(path))
        return (tree, None) if trains else (None, tree)
    parts = [_split(child, is_trained, (*path, *key)) for key, child in below]
    if type(tree) is not dict:
        return (
            jax.tree.unflatten(structure, [moving for moving, _ in parts]),
            jax.tree.unflatten(structure, [resting for _, resting in parts]),
        )
    trained, frozen = {}, {}
    for ([key], child), (moving, resting) in zip(below, parts, strict=True):
        if jax.tree.leaves(moving):
            trained[key.key] = moving
        # What has no parameter at all, such as None for a bias, is kept here.
        if jax.tree.leaves(resting) or not jax.tree.leaves(child):
            frozen[key.key] = resting
    return trained, frozen
