"""The messages of rounds of local steps: what they have beside a delta."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from nebula_jax.parallel.local_steps import delta_control
from nebula_jax.training import local_steps

MOST = 2**32 - 1
"""The largest number in a head."""
DIGEST_BYTES = 32

Key = tuple[int, int]
"""Step after which a round's messages are sent, and its fragment."""


class Head(NamedTuple):
    """The facts of a message beside its delta; integers from 0 to MOST."""

    step: int
    """After which it was sent: this names the round."""
    fragment: int
    version: int
    """Outer steps that made the anchor it counts from."""
    tokens: int
    """Trained on since this cluster's message before of the same fragment. Of a round
    that went on without it, the share that its parameters have kept."""
    milliseconds: int = 0
    """That the run has lasted in this cluster; with a schedule by time."""
    is_stopping: int = 0
    """1 if this cluster requests the end of the run."""


def spec(fragment: local_steps.Fragment, has_figures: bool = False) -> dict[str, Any]:
    """Returns the specs of a message's arrays, for its channel.

    Args:
      fragment: specs of its parameters.
      has_figures: True if the codec is chosen by what messages report.
    """
    return {
        **({"figures": delta_control.spec()} if has_figures else {}),
        "head": jax.ShapeDtypeStruct((len(Head._fields),), jnp.uint32),
        "anchor": jax.ShapeDtypeStruct((DIGEST_BYTES,), jnp.uint8),
        "delta": {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            for name, leaf in fragment.items()
        },
    }
