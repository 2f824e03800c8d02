"""The parameters that an XNLI run tests, selected on English dev alone."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from experiments.xnli import config


class Selection(NamedTuple):
    """The parameters that are selected so far, and the evaluations behind that."""

    step: int
    """The selected step; 0 before any."""
    params: Any
    """Parameters of the selected step."""
    curve: tuple[tuple[int, float], ...] = ()
    """(step, accuracy on English dev) of every evaluation."""

    @property
    def position(self) -> dict[str, Any]:
        """A selection without its parameters, as JSON values of a checkpoint."""
        return {
            "selected_step": self.step,
            "curve": [list(each) for each in self.curve],
        }


def select(
    agreed: config.Agreed, before: Selection, step: int, accuracy: float, params: Any
) -> Selection:
    """Returns the selection after one more evaluation.

    Args:
      agreed: of the run, with the rule: --checkpoint_selection.
      before: the selection so far.
      step: that was evaluated.
      accuracy: on English dev.
      params: after `step`; copied, because the next step uses them up.
    """
    curve = (*before.curve, (step, accuracy))
    rule = agreed.checkpoint_selection
    if rule == "last" or all(accuracy > earlier for _, earlier in before.curve):
        return Selection(step, jax.tree.map(jnp.copy, params), curve)
    return before._replace(curve=curve)


def restored(params: Any, position: Mapping[str, Any] | None) -> Selection:
    """Returns the selection of a checkpoint, or that before any evaluation.

    Args:
      params: `best` of the checkpoint; at the beginning, any tree of that shape.
      position: of the checkpoint; None at the beginning.
    """
    if position is None:
        return Selection(0, params)
    curve = tuple((step, accuracy) for step, accuracy in position["curve"])
    return Selection(position["selected_step"], params, curve)
