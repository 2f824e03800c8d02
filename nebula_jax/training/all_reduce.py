"""The gradient of a batch whose rows lie on many devices: when its parts are added up.

    each   in every micro-batch, as the compiler has it of the shardings
    once   each device adds up its own micro-batches, and one sum follows

Both take the same step, up to the rounding of sums. With N micro-batches `each` sends N
times as much.

B rows of a batch, N micro-batches.
"""

from typing import Any

import jax
import jax.flatten_util
from jax.sharding import Mesh, PartitionSpec

from nebula_jax import errors
from nebula_jax.models import activations
from nebula_jax.models.activations import FSDP, MODEL, ROWS
from nebula_jax.training import accumulate

WHEN = ("each", "once")


def gradients(
    loss: accumulate.Loss, params: Any, batch: Any, micro_batches: int, when: str
) -> tuple[Any, accumulate.Outcome]:
    """Computes the gradient and the outcome of a batch's loss, on the mesh in use.

    The weight that the loss is divided by is that of the whole batch: compute it before
    (`accumulate`). A micro-batch has rows of all devices; its number, from which keys
    are derived, is another on each device, if they add up for themselves. What the loss
    closes over is whole on every device; batches [B, ...] are split over the mesh's
    `data` and `fsdp`. Raises errors.SettingsError if N and the devices do not divide B,
    or if devices that add up for themselves would have to share parameters.
    """
    mesh = activations.mesh()
    check(jax.tree.leaves(batch)[0].shape[0], micro_batches, when, mesh)
    if mesh is None or when == "each" or activations.devices(mesh, ROWS) == 1:
        return accumulate.gradients(loss, params, batch, micro_batches)

    def own(params: Any, batch: Any) -> tuple[Any, tuple[Any, ...]]:
        first = jax.lax.axis_index(ROWS) * micro_batches

        def numbered(params: Any, rows: Any, number: Any) -> accumulate.Outcome:
            return loss(params, rows, first if number is None else first + number)

        found = accumulate.gradients(numbered, params, batch, micro_batches)
        grads, outcome = _add_up(*found)
        return grads, tuple(outcome)

    everywhere, rows = PartitionSpec(), PartitionSpec(ROWS)
    of_devices = jax.shard_map(
        own,
        mesh=mesh,
        in_specs=(everywhere, rows),
        out_specs=(everywhere, (everywhere, everywhere, rows)),
        check_vma=False,  # else every micro-batch's gradient would be added up
    )
    # Each device has its own, whole activations.
    grads, outcome = activations.on(None, of_devices)(params, batch)
    return grads, accumulate.Outcome(*outcome)


def check(rows: int, micro_batches: int, when: str, mesh: Mesh | None) -> None:
    """Raises errors.SettingsError if a batch of B rows cannot be divided so."""
    if when not in WHEN:
        raise errors.SettingsError(
            f"all_reduce is {when!r}; it can be {', '.join(WHEN)}"
        )
    devices = 1 if mesh is None else activations.devices(mesh, ROWS)
    if rows % (devices * micro_batches):
        raise errors.SettingsError(
            f"{rows} rows do not divide over {devices} devices with {micro_batches}"
            " micro-batches each"
        )
    if mesh is None or when == "each":
        return
    if mesh.shape[FSDP] > 1 or mesh.shape[MODEL] > 1:
        raise errors.SettingsError(
            f"all_reduce={when} needs all parameters on every device, but they are"
            f" split: fsdp={mesh.shape[FSDP]}, model_parallel={mesh.shape[MODEL]};"
            " set both to 1, or all_reduce=each"
        )


def _add_up(grads: Any, outcome: accumulate.Outcome) -> tuple[Any, accumulate.Outcome]:
    """Adds up what all devices have, as one vector: a latency for all of it."""
    vector, parted = jax.flatten_util.ravel_pytree((grads, outcome[:2]))
    grads, (loss, sums) = parted(jax.lax.psum(vector, ROWS))
    return grads, accumulate.Outcome(loss, sums, outcome.rows)
