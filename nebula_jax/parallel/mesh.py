"""Devices of one cluster as a mesh with axes `data` and `model`.

A batch is split over `data`. A parameter is split over `model` by the first of RULES
whose pattern is found in its path, and so are its optimizer moments, whose paths end
alike. An axis that does not divide is left whole.
"""

import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from nebula_jax import errors

Rules = Sequence[tuple[str, PartitionSpec]]

# V vocabulary, D width, H heads, K head width, F feed-forward (Megatron-LM's cut).
ENCODER_RULES: Rules = (
    (r"word_embeddings/embedding$", PartitionSpec("model", None)),  # [V, D]
    (r"attention/(query|key|value)/kernel$", PartitionSpec(None, "model", None)),
    (r"attention/(query|key|value)/bias$", PartitionSpec("model", None)),  # [H, K]
    (r"attention/output/kernel$", PartitionSpec("model", None, None)),  # [H, K, D]
    (r"intermediate/kernel$", PartitionSpec(None, "model")),  # [D, F]
    (r"intermediate/bias$", PartitionSpec("model")),  # [F]
    (r"layer_\d+/output/kernel$", PartitionSpec("model", None)),  # [F, D]
)


def make_mesh(devices: Sequence[jax.Device], model_parallel: int = 1) -> Mesh:
    """A mesh of len(devices)/model_parallel by model_parallel devices.

    Raises:
      errors.NebulaError: if that does not come out even.
    """
    if len(devices) % model_parallel:
        raise errors.NebulaError(
            f"--model_parallel={model_parallel} does not divide {len(devices)} devices"
        )
    grid = np.asarray(devices).reshape(-1, model_parallel)
    return Mesh(grid, ("data", "model"))


def state_sharding(mesh: Mesh, rules: Rules, tree: Any) -> Any:
    """The NamedSharding of every leaf of a state.

    Args:
      mesh: of this cluster.
      rules: (pattern, PartitionSpec), first match wins; no match means a copy on
        every device.
      tree: arrays or ShapeDtypeStructs.

    Returns:
      The tree with shardings as leaves.
    """

    def sharding(path, leaf) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        for pattern, spec in rules:
            if re.search(pattern, name):
                return NamedSharding(mesh, _that_divides(mesh, spec, leaf.shape))
        return replicated(mesh)

    return jax.tree_util.tree_map_with_path(sharding, tree)


def _that_divides(mesh: Mesh, spec: PartitionSpec, shape) -> PartitionSpec:
    return PartitionSpec(
        *(
            axis if axis is None or size % mesh.shape[axis] == 0 else None
            for axis, size in zip(spec, shape, strict=True)
        )
    )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """First axis split over `data`."""
    return NamedSharding(mesh, PartitionSpec("data"))


def replicated(mesh: Mesh) -> NamedSharding:
    """A copy on every device."""
    return NamedSharding(mesh, PartitionSpec())
