"""Smaller steps for lower layers (ELECTRA; ERNIE-M's fine-tuning, section 4.1).

    optax.chain(optimizers.adam(schedule), layer_decay.scale_by_layer(0.8, layers=12))

An encoder of n layers: layer i, counted from 0, learns at d^(n-i) of the rate, so the
top one at d; embeddings at d^(n+1); heads at the whole rate. That is ERNIE's rule, and
what ELECTRA intended: its code gives the top layer d^2, left over from a pooler.
"""

import re
from typing import Any

import jax
import optax

_LAYER = re.compile(r"(?:^|/)encoder/layer_(\d+)/")
_EMBEDDINGS = re.compile(r"(?:^|/)embeddings/")


def factor(path: str, decay: float, layers: int) -> float:
    """What the rate of a parameter is multiplied by.

    >>> factor("encoder/layer_11/output/kernel", decay=0.8, layers=12)
    0.8

    Args:
      path: of the parameter.
      decay: d; 1 for one rate everywhere.
      layers: n.
    """
    layer = _LAYER.search(path)
    if layer:
        return decay ** (layers - int(layer[1]))
    return decay ** (layers + 1) if _EMBEDDINGS.search(path) else 1.0


def scale_by_layer(decay: float, layers: int) -> optax.GradientTransformation:
    """Multiplies each parameter's update by its `factor`; last in a chain."""

    def scale(updates: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: (
                leaf
                * factor(
                    jax.tree_util.keystr(path, simple=True, separator="/"),
                    decay,
                    layers,
                )
            ),
            updates,
        )

    return optax.stateless(lambda updates, params: scale(updates))
