"""`--staleness=1`: the source trains with the gradient of the step before.

Then a step's hidden states cross before the gradient of the step before has come: over
a line with a long round trip nobody waits for it. In step 1 the source trains with 0,
and the gradient of the last step is not used. The target's gradients are of their own
step.
"""

from typing import Any

import jax
import jax.numpy as jnp

from experiments.abnet import config, models
from nebula_jax.parallel import mesh as mesh_lib
from nebula_jax.parallel import pipeline
from nebula_jax.training import cut

LATE = "late"
"""Name of that gradient among the arrays of a cluster."""


def planned(agreed: config.Agreed, fresh: mesh_lib.ShardedInit) -> mesh_lib.ShardedInit:
    """Plans the source's arrays with the gradient that is late, if one is.

    Args:
      agreed: of the run.
      fresh: {"state", "codecs"}.
    """
    if not agreed.staleness:
        return fresh

    def make() -> dict[str, Any]:
        values = fresh.init()
        return values | {LATE: jax.tree.map(jnp.zeros_like, values["state"].params)}

    shapes, placed = fresh.shapes["state"].params, fresh.sharding["state"].params
    return mesh_lib.ShardedInit(
        make, fresh.shapes | {LATE: shapes}, fresh.sharding | {LATE: placed}
    )


def under_way(
    agreed: config.Agreed,
    half: models.Half,
    ahead: int,
    start: int,
    restored: dict[str, Any],
) -> pipeline.UnderWay | None:
    """Goes on with what is under way in the source; None if steps do not overlap.

    Args:
      agreed: of the run.
      half: of the source.
      ahead: micro-batches that may be under way.
      start: the step that the run goes on after.
      restored: the source's arrays after it.
    """
    if not agreed.staleness:
        return None
    made = pipeline.UnderWay(half.program, ahead)
    made.begin(start, restored[LATE])
    return made


def arrays(
    flight: pipeline.UnderWay | None, step: int, codecs: list[cut.CodecStates]
) -> dict[str, Any]:
    """Returns what is saved beside the source's state after a step; waits for it.

    Args:
      flight: from `under_way`.
      step: that the source has taken.
      codecs: states of its codecs, which hold no arrays.
    """
    return {} if flight is None else {LATE: flight.finish(step, codecs[0])[0]}
