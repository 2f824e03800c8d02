"""What a loop of a user's gives to a Run, checked before it can do harm."""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nebula_jax import errors
from nebula_jax.communication import ranks
from nebula_jax.face import state as state_lib
from nebula_jax.face import values as values_lib
from nebula_jax.runtime import local_steps


class Misuse(errors.SettingsError):
    """A call of a Run that comes too early, or never; the text says what to change."""


def numbers(what: str, found: Any) -> dict[str, Any]:
    """Returns name -> scalar; raises Misuse if they are something else."""
    if not isinstance(found, Mapping):
        raise Misuse(f"{what} are a dict of numbers, not a {type(found).__name__}")
    for name, value in found.items():
        if np.shape(value) != () or isinstance(value, str):
            raise Misuse(
                f"{what}: {name} is no number but {type(value).__name__} of shape"
                f" {list(np.shape(value))}"
            )
    return dict(found)


def of_type(kind: type, values: Any) -> list[Any]:
    """Returns those parts of values that are of a type, such as State."""

    def is_one(value: Any) -> bool:
        return isinstance(value, kind)

    return [each for each in jax.tree.leaves(values, is_leaf=is_one) if is_one(each)]


def check_rounds(rounds: local_steps.Rounds | None, values: Any) -> None:
    """Raises Misuse if a run has rounds, and they are not among its values."""
    if rounds is not None and not of_type(local_steps.Rounds, values):
        raise Misuse(
            "give run.restore and run.done the rounds of nebula.local_steps, too:"
            " state, rounds = run.restore(state, rounds)"
        )


def finite(values: Any, metrics: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Returns `is_finite`, [] bool, of the loss and each State; {} without any."""
    found = [each.is_finite for each in of_type(state_lib.State, values)]
    if "loss" in metrics:
        found.append(jnp.isfinite(metrics["loss"]))
    return {"is_finite": jnp.all(jnp.stack(found))} if found else {}


def digest(batch: Any) -> str:
    """Returns a digest of a batch, a pytree of arrays: of their bytes on this host."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(batch):
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            continue  # has rows of other processes, which would have to take part
        array = np.asarray(values_lib.without_key(leaf))
        found.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    return found.hexdigest()[:16]


def check_batches(
    batch_of: Callable[[int], Any], step: int, batch: Any, start: int, saved: str | None
) -> None:
    """Raises Misuse if a function does not make a step's batch again.

    Args:
      batch_of: step -> batch.
      step: the first one of this process.
      start: step that the run resumes after.
      saved: digest of the batch of `start`, when it was trained on; None at the
        beginning.
    """
    again = "; draw from a generator seeded by the step: np.random.default_rng(step)"
    if digest(batch_of(step)) != digest(batch):
        raise Misuse(
            f"run.batches: the function gave two batches for step {step}{again}"
        )
    # All call it, as it may need all; the root compares its own rows.
    if saved and digest(batch_of(start)) != saved and ranks.is_root():
        raise Misuse(
            f"run.batches: the batch of step {start} is another one than before the run"
            f" was resumed{again}, and keep the data, or name another workdir"
        )
