"""The state of a model in training: parameters, optimizer, step and randomness."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct


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
        """Returns the state as if it had taken `step` steps.

        So its learning rate and its randomness are those of others that have. Moments
        stay as they are, and so does the count that corrects their bias: it is of the
        gradients that they have seen.
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
        """Takes one optimization step, unless something of it is not finite.

        Such a step leaves parameters and optimizer as they are, as if it had not been;
        only the step number goes on. So a state that is finite stays so.

        Args:
          grads: like the parameters.
          metrics: of the step, with its `loss`, [] float32, if it has one.
          seen: what an optimizer needs besides, such as that of `warm_start`; others do
            without.

        Returns:
          The next state, and the metrics with `is_finite`, [] bool: False if the loss,
          the norm of the gradient, or that of the next parameters was not.
        """
        updates, opt_state = optax.with_extra_args_support(optimizer).update(
            grads, self.opt_state, self.params, step=self.step, **seen
        )
        params = optax.apply_updates(self.params, updates)
        sizes = [optax.tree.norm(grads), optax.tree.norm(params)]
        if "loss" in metrics:  # a part of a cut model may have none
            sizes.append(metrics["loss"])
        is_finite = jnp.all(jnp.isfinite(jnp.stack(sizes)))
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(is_finite, new, old),
            (params, opt_state),
            (self.params, self.opt_state),
        )
        state = dataclasses.replace(
            self, step=self.step + 1, params=params, opt_state=opt_state
        )
        return state, {**metrics, "is_finite": is_finite}


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
