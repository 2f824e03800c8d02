"""The gradient of a batch whose rows lie on many devices: when its parts are added up.

    each         in every micro-batch, as the compiler has it of the shardings
    once         each device adds up its own micro-batches, and one sum follows
    overlapped   the same, but part by part in the last micro-batch: the sum of the top
                 layer is in flight while the gradient of those below is computed

All three take the same step, up to the rounding of sums. With N micro-batches `each`
sends N times as much. `overlapped` gains where a collective runs beside computation (on
GPUs), and costs the latency of a sum for each part.

B rows of a batch, N micro-batches, P parts.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from nebula_jax import errors
from nebula_jax.models import activations
from nebula_jax.models.activations import DATA, FSDP, MODEL, ROWS
from nebula_jax.training import accumulate

WHEN = ("each", "once", "overlapped")

Part = Callable[[str], int]
"""Path of a parameter, as in `encoder/layer_0/output/kernel` -> number of its part;
the gradients of lower numbers are there earlier."""


def replicas() -> int:
    """Returns among how many groups of devices a batch is split, where this is traced.

    That is on the mesh that `activations.on` has put in use; without one, 1.
    """
    mesh = activations.mesh()
    return 1 if mesh is None else mesh.shape[DATA] * mesh.shape[FSDP]


def gradients(
    loss: accumulate.Loss,
    params: Any,
    batch: Any,
    micro_batches: int,
    when: str,
    part: Part,
) -> tuple[Any, accumulate.Outcome]:
    """Computes the gradient of a batch's loss, on the mesh that is in use.

    The weight that the loss is divided by is that of the whole batch: compute it before
    (`accumulate`). A micro-batch has rows of all devices; its number, from which keys
    are derived, is another on each device, if they add up for themselves.

    Args:
      loss: of a micro-batch; what it closes over is whole on every device.
      params: its first argument.
      batch: tree of arrays [B, ...], split over the mesh's `data` and `fsdp`.
      micro_batches: N; together with the devices, divides B.
      when: one of WHEN.
      part: groups the parameters, for `overlapped`.

    Returns:
      The gradient, like the parameters, and the batch's outcome.

    Raises:
      errors.SettingsError: if rows do not divide, or if devices that add up for
        themselves would have to share parameters.
    """
    mesh = activations.mesh()
    check(jax.tree.leaves(batch)[0].shape[0], micro_batches, when, mesh)
    if mesh is None or when == "each" or replicas() == 1:
        return accumulate.gradients(loss, params, batch, micro_batches)

    def own(params: Any, batch: Any) -> tuple[Any, tuple[Any, ...]]:
        first = jax.lax.axis_index(ROWS) * micro_batches

        def numbered(params: Any, rows: Any, number: Any) -> accumulate.Outcome:
            return loss(params, rows, first if number is None else first + number)

        compute = accumulate.gradients if when == "once" else _last_apart
        grads, outcome = compute(numbered, params, batch, micro_batches)
        groups = part if when == "overlapped" else lambda path: 0
        grads, outcome = _add_up(grads, outcome, groups)
        return grads, tuple(outcome)

    everywhere, rows = PartitionSpec(), PartitionSpec(ROWS)
    with activations.nowhere():  # each device has its own, whole activations
        grads, outcome = jax.shard_map(
            own,
            mesh=mesh,
            in_specs=(everywhere, rows),
            out_specs=(everywhere, (everywhere, everywhere, rows)),
            check_vma=False,  # else every micro-batch's gradient would be added up
        )(params, batch)
    return grads, accumulate.Outcome(*outcome)


def check(rows: int, micro_batches: int, when: str, mesh: Mesh | None) -> None:
    """Checks that a batch can be divided so.

    Args:
      rows: B.
      micro_batches: N.
      when: one of WHEN.
      mesh: in use, if any.

    Raises:
      errors.SettingsError: if not, with what could.
    """
    if when not in WHEN:
        raise errors.SettingsError(
            f"all_reduce is {when!r}; it can be {', '.join(WHEN)}"
        )
    devices = 1 if mesh is None else mesh.shape[DATA] * mesh.shape[FSDP]
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


def _last_apart(
    loss: accumulate.Loss, params: Any, batch: Any, micro_batches: int
) -> tuple[Any, accumulate.Outcome]:
    """Computes `accumulate.gradients` with the last micro-batch after the loop.

    A loop returns everything at its end; what follows it can be added up as it comes.
    """
    divided = jax.tree.map(lambda leaf: accumulate.split(leaf, micro_batches), batch)
    last = jax.tree.map(lambda leaf: leaf[-1], divided)

    def numbered(params: Any, rows: Any, number: Any) -> accumulate.Outcome:
        del number
        return loss(params, rows, jnp.asarray(micro_batches - 1))

    grads, outcome = accumulate.gradients(numbered, params, last, 1)
    if micro_batches == 1:
        return grads, outcome
    before = jax.tree.map(lambda leaf: accumulate.join(leaf[:-1]), divided)
    found, earlier = accumulate.gradients(loss, params, before, micro_batches - 1)
    grads = jax.tree.map(jnp.add, found, grads)
    added, sums = jax.tree.map(jnp.add, earlier[:2], outcome[:2])

    def together(early: jax.Array, late: jax.Array) -> jax.Array:
        parts = accumulate.split(early, micro_batches - 1)
        return accumulate.join(jnp.concatenate([parts, late[None]]))

    rows = jax.tree.map(together, earlier.rows, outcome.rows)
    return grads, accumulate.Outcome(added, sums, rows)


def _add_up(
    grads: Any, outcome: accumulate.Outcome, part: Part
) -> tuple[Any, accumulate.Outcome]:
    """Adds up the gradients of all devices, a sum for each part, and their outcomes."""
    paths, structure = jax.tree_util.tree_flatten_with_path(grads)
    leaves = [leaf for _, leaf in paths]
    numbers = [
        part(jax.tree_util.keystr(path, simple=True, separator="/"))
        for path, _ in paths
    ]
    parts = [
        [place for place, number in enumerate(numbers) if number == wanted]
        for wanted in sorted(set(numbers))
    ]
    figures, structure_of_figures = jax.tree.flatten(outcome[:2])
    added, before, sums = dict[int, jax.Array](), None, list[jax.Array]()
    for places in parts:
        own = [leaves[place] for place in places]
        own += figures if places is parts[-1] else []
        sums, before = _sum(own, before)
        added |= dict(zip(places, sums, strict=False))
    figures = sums[len(parts[-1]) :]
    loss, of_outcome = jax.tree.unflatten(structure_of_figures, figures)
    whole = jax.tree.unflatten(structure, [added[n] for n in range(len(leaves))])
    return whole, accumulate.Outcome(loss, of_outcome, outcome.rows)


def _sum(
    arrays: Sequence[jax.Array], before: jax.Array | None
) -> tuple[list[jax.Array], jax.Array]:
    """Adds up arrays over all devices as one vector: a latency for all of them.

    Args:
      arrays: float32.
      before: the vector that was added up before, which this one waits for. If the
        compiler saw no reason to wait, it would make one sum of all, at the end.

    Returns:
      The sums, and their vector.
    """
    vector = jnp.concatenate([jnp.ravel(each) for each in arrays])
    if before is not None:
        vector = jnp.where(jnp.isnan(before[0]), jnp.nan, vector)
    vector = jax.lax.psum(vector, ROWS)
    ends = list(itertools.accumulate(each.size for each in arrays))
    pieces = jnp.split(vector, ends[:-1])
    shaped = [
        piece.reshape(each.shape) for piece, each in zip(pieces, arrays, strict=True)
    ]
    return shaped, vector
