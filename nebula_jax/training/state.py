"""The state of a model in training: parameters, optimizer, step and randomness."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from nebula_jax.training import finite


@struct.dataclass
class TrainState:
    """The state of one model, sufficient to resume its training.

    step: [] int32, optimization steps taken.
    params: parameter tree, float32.
    opt_state: optax state.
    rng: [2] uint32, key data; step t draws from `key(t)`, so that the randomness of a
      step does not depend on where the run was resumed.
    """

    step: jax.Array
    params: Any
    opt_state: optax.OptState
    rng: jax.Array

    def key(self) -> jax.Array:
        """Returns the key of the coming step."""
        return jax.random.fold_in(jax.random.wrap_key_data(self.rng), self.step)

    def at_step(self, step: int) -> "TrainState":
        """Returns the state as if it had taken `step` steps: the same rate, and keys.

        Moments stay as they are, and so does the count that corrects their bias: that
        of the gradients that they have seen.
        """

        def at(count: jax.Array) -> jax.Array:
            return jax.device_put(jnp.array(step, count.dtype), count.sharding)

        def is_schedule(node: Any) -> bool:
            return isinstance(node, optax.ScaleByScheduleState)

        opt_state = jax.tree.map(
            lambda node: (
                node._replace(count=at(node.count)) if is_schedule(node) else node
            ),
            self.opt_state,
            is_leaf=is_schedule,
        )
        return dataclasses.replace(self, step=at(self.step), opt_state=opt_state)

    def apply_gradients(
        self,
        grads: Any,
        optimizer: optax.GradientTransformation,
        metrics: Mapping[str, jax.Array],
        **seen: Any,
    ) -> tuple["TrainState", dict[str, jax.Array]]:
        """Takes one optimization step, unless its loss or gradient is not finite.

        Such a step leaves parameters and optimizer as they are, as if it had not been;
        only the step number goes on. A rate with which parameters overflow spoils them:
        what is updated in place cannot be taken back. `seen` is what an optimizer needs
        besides, such as that of `warm_start`. Returns the next state, and the metrics
        with `is_finite`, [] bool: False if their `loss`, [] float32, the gradient, or a
        next parameter was not, or has a square that is not.
        """
        # A part of a cut model may have no loss.
        is_finite = jnp.isfinite(metrics.get("loss", 0.0))

        def update(params: Any, opt_state: optax.OptState) -> tuple[Any, Any]:
            updates, opt_state = optax.with_extra_args_support(optimizer).update(
                grads, opt_state, params, step=self.step, **seen
            )
            return optax.apply_updates(params, updates), opt_state

        (params, opt_state), is_finite = update_if_finite(
            grads, update, self.params, self.opt_state, is_finite
        )
        state = dataclasses.replace(
            self, step=self.step + 1, params=params, opt_state=opt_state
        )
        return state, {**metrics, "is_finite": is_finite}


def update_if_finite(
    grads: Any,
    update: Callable[..., tuple[Any, Any]],
    params: Any,
    opt_state: optax.OptState,
    is_finite: jax.Array | bool = True,
) -> tuple[tuple[Any, Any], jax.Array]:
    """Updates parameters and optimizer, in place where they are donated.

    On CPUs by a condition: of a choice between two results XLA keeps both there, which
    takes several times as long. Elsewhere by a choice, since for a condition the host
    of a GPU waits. Nothing is updated if the gradients are not finite or `is_finite`,
    [] bool, is False. Returns what `update` makes of (params, opt_state); and [] bool,
    False if nothing was updated, or the next parameters are not finite.
    """
    before = params, opt_state
    is_finite &= finite.all_finite(grads, squares=True)
    # An optimizer may widen its state in the first step.
    types = jax.tree.map(lambda leaf: leaf.dtype, jax.eval_shape(update, *before))
    before = jax.tree.map(jax.lax.convert_element_type, before, types)
    if jax.default_backend() == "cpu":
        after = jax.lax.cond(is_finite, update, lambda *kept: kept, *before)
    else:
        after = jax.tree.map(
            lambda new, old: jnp.where(is_finite, new, old), update(*before), before
        )
    return after, is_finite & finite.all_finite(after[0], squares=True)


def create(
    params: Any, optimizer: optax.GradientTransformation, rng: jax.Array
) -> TrainState:
    """Makes a state at step 0; `rng` is a key."""
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(params),
        rng=jax.random.key_data(rng),
    )
