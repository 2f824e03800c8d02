"""The sharding rules of every model: which axis of an array lies on which mesh axis.

    data    copies of a model; batches are split over it
    fsdp    batches are split over it too, and so are parameters, at rest
    model   parameters are split over it, and stay split while they are used

An optimizer's moments have the paths of their parameters at their ends, and lie alike.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from nebula_jax import errors
from nebula_jax.models.activations import FSDP, MODEL, ROWS
from nebula_jax.training import partition

BATCH = PartitionSpec(ROWS)  # the first axis
REPLICATED = PartitionSpec()  # a copy on every device


class Rule(NamedTuple):
    """A place for the arrays whose path matches."""

    pattern: str  # searched for in a path such as `encoder/layer_0/output`
    spec: PartitionSpec  # a mesh axis, or None, for each axis of the array
    what: str = ""  # the things that are split over `model`, for errors


Rules = Sequence[Rule]

# V vocabulary, D width, H heads, K head width, F feed-forward (Megatron-LM's cut). What
# is not here is small: biases, layer norms, positions, and the matrix of a head.
_PIECES, _INNER = "pieces of the vocabulary", "inner units of the feed-forward part"
_QKV = r"attention/(query|key|value)"
RULES: Rules = (
    # [V, D]
    Rule(r"word_\w+/embedding$", PartitionSpec(MODEL, FSDP), _PIECES),
    Rule(_QKV + "/kernel$", PartitionSpec(FSDP, MODEL, None), "heads"),  # [D, H, K]
    Rule(_QKV + "/bias$", PartitionSpec(MODEL, None), "heads"),  # [H, K]
    # [H, K, D]
    Rule(r"attention/output/kernel$", PartitionSpec(MODEL, None, FSDP), "heads"),
    # [D, F]
    Rule(r"(intermediate|gate)/kernel$", PartitionSpec(FSDP, MODEL), _INNER),
    Rule(r"intermediate/bias$", PartitionSpec(MODEL), _INNER),  # [F]
    Rule(r"layer_\d+/output/kernel$", PartitionSpec(MODEL, FSDP), _INNER),  # [F, D]
    Rule(r"(mlm|clm)_head/bias$", PartitionSpec(MODEL), _PIECES),  # [V]
)


def spec_of(rules: Rules, mesh: Mesh, path: str, shape: Sequence[int]) -> PartitionSpec:
    """Finds where an array lies, by the first rule whose pattern is found in its path.

    No match means a copy on every device; an axis that `fsdp` does not divide is left
    whole. Raises errors.SettingsError if `model` does not divide what it is to split.
    """
    for rule in rules:
        if re.search(rule.pattern, path):
            placed = zip(rule.spec, shape, strict=False)
            return PartitionSpec(*(_place(mesh, rule, path, *each) for each in placed))
    return REPLICATED


def _place(
    mesh: Mesh, rule: Rule, path: str, axis: str | None, size: int
) -> str | None:
    if axis is None or size % mesh.shape[axis] == 0:
        return axis
    if axis != MODEL:
        return None
    raise errors.SettingsError(
        f"model_parallel={mesh.shape[axis]} does not divide the {size}"
        f" {rule.what or 'rows'} of {path}; {nearest_divisor(size, mesh.shape[axis])}"
        " does"
    )


def nearest_divisor(size: int, wanted: int) -> int:
    """Returns the divisor of `size` nearest to `wanted`; of two, the smaller."""
    divisors = (each for each in range(1, size + 1) if size % each == 0)
    return min(divisors, key=lambda each: (abs(each - wanted), each))


def shardings(mesh: Mesh, rules: Rules, tree: Any) -> Any:
    """Finds the NamedSharding of every leaf of a state; raises as `spec_of`."""

    def sharding(path: str, leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, spec_of(rules, mesh, path, leaf.shape))

    return partition.map_named(sharding, tree)
